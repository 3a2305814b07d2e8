// RocketMQ's Go client: sends, reads what has a tag, and prints one line of JSON.
//
// Usage: client <name server> <topic> <count> <secret>
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const waits = 60 * time.Second

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(nameServer, topic, words, secret string) error {
	rlog.SetLogLevel("error")
	count, err := strconv.Atoi(words)
	if err != nil {
		return err
	}
	names := primitive.NewPassthroughResolver([]string{nameServer})
	credentials := primitive.Credentials{AccessKey: "raymq", SecretKey: secret}
	found := map[string]any{}

	sender, err := rocketmq.NewProducer(producer.WithNsResolver(names), producer.WithRetry(1),
		producer.WithGroupName("go-producers"), producer.WithCredentials(credentials))
	if err != nil {
		return err
	}
	if err = sender.Start(); err != nil {
		return err
	}
	sent := 0
	for i := 0; i < count; i++ {
		for _, tag := range []string{"wanted", "other"} {
			message := primitive.NewMessage(topic, []byte(fmt.Sprintf("%s-%d", tag, i)))
			message.WithTag(tag).WithKeys([]string{fmt.Sprintf("key-%d", i)})
			message.WithProperty("number", strconv.Itoa(i))
			answer, err := sender.SendSync(context.Background(), message)
			if err != nil {
				return err
			}
			if answer.Status == primitive.SendOK {
				sent++
			}
		}
	}
	found["sent"] = sent
	if err = sender.Shutdown(); err != nil {
		return err
	}

	reader, err := rocketmq.NewPushConsumer(consumer.WithNsResolver(names),
		consumer.WithGroupName("go-readers"), consumer.WithCredentials(credentials),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	if err != nil {
		return err
	}
	var lock sync.Mutex
	bodies, again, retried := map[string]bool{}, 0, false
	wanted := consumer.MessageSelector{Type: consumer.TAG, Expression: "wanted"}
	err = reader.Subscribe(topic, wanted, func(ctx context.Context,
		messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		lock.Lock()
		defer lock.Unlock()
		for _, each := range messages {
			if each.GetProperty("number") == "0" && each.ReconsumeTimes == 0 {
				// It is sent back, and comes again.
				retried = true
				return consumer.ConsumeRetryLater, nil
			}
			if each.ReconsumeTimes > 0 {
				again++
			}
			bodies[string(each.Body)] = true
		}
		return consumer.ConsumeSuccess, nil
	})
	if err != nil {
		return err
	}
	if err = reader.Start(); err != nil {
		return err
	}
	for until := time.Now().Add(waits); time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
		lock.Lock()
		isAll := len(bodies) == count
		lock.Unlock()
		if isAll {
			break
		}
	}
	lock.Lock()
	defer lock.Unlock()
	found["read"], found["retried"], found["again"] = len(bodies), retried, again
	line, err := json.Marshal(found)
	if err != nil {
		return err
	}
	fmt.Println(string(line))
	return nil
}
