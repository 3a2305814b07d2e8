import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * Producers that send until a line comes on standard input, and a push consumer. Each line of standard output is a
 * fact: "ack ID", "unknown ID ERROR", and at the end "all" when the consumer has had each message that was acknowledged.
 */
public class LoadScenario {
    private static final int WAIT_MS = 60_000;

    public static void main(String[] args) throws Exception {
        String nameServer = args[0];
        String topic = args[1];
        String group = args[2];
        int producers = Integer.parseInt(args[3]);
        RPCHook hook = new AclClientRPCHook(
                new SessionCredentials("raymq", System.getProperty("raymq.secret")));
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);

        Map<String, Integer> seen = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, hook);
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt each : messages) {
                seen.merge(new String(each.getBody(), StandardCharsets.UTF_8), 1, Integer::sum);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();

        DefaultMQProducer producer = new DefaultMQProducer("load-producers", hook);
        producer.setNamesrvAddr(nameServer);
        // A retry of the client may store a message twice, also with RocketMQ.
        producer.setRetryTimesWhenSendFailed(0);
        producer.start();
        Set<String> acked = ConcurrentHashMap.newKeySet();
        AtomicBoolean stopped = new AtomicBoolean();
        Thread[] threads = new Thread[producers];
        for (int i = 0; i < producers; i++) {
            int number = i;
            threads[i] = new Thread(() -> {
                for (int count = 0; !stopped.get(); count++) {
                    String id = number + "-" + count;
                    try {
                        Message message = new Message(topic, id.getBytes(StandardCharsets.UTF_8));
                        SendStatus status = producer.send(message).getSendStatus();
                        if (status == SendStatus.SEND_OK) {
                            acked.add(id);
                            out.println("ack " + id);
                        } else {
                            out.println("unknown " + id);
                        }
                    } catch (Exception error) {
                        out.println("unknown " + id + " " + error);
                    }
                }
            });
            threads[i].start();
        }

        new BufferedReader(new InputStreamReader(System.in)).readLine();
        stopped.set(true);
        for (Thread each : threads) {
            each.join();
        }
        long end = System.currentTimeMillis() + WAIT_MS;
        while (!seen.keySet().containsAll(acked) && System.currentTimeMillis() < end) {
            Thread.sleep(20);
        }
        long missing = acked.stream().filter(each -> !seen.containsKey(each)).count();
        out.println(missing == 0 ? "all" : "missing " + missing);
        System.exit(0);
    }
}
