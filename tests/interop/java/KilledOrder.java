import java.nio.charset.StandardCharsets;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * A consumer in order, and perhaps producers. Facts: "ack ID" of each message that was acknowledged; "work QUEUE OFFSET
 * BEGIN END ID" of each one that the consumer had, in ns of a clock that all processes of the machine share.
 */
public final class KilledOrder {
    private KilledOrder() {
    }

    public static void main(String[] args) throws Exception {
        String nameServer = args[0];
        String topic = args[1];
        int producers = Integer.parseInt(args[2]);
        DefaultMQPushConsumer consumer = consume(nameServer, topic);
        Set<String> acked = ConcurrentHashMap.newKeySet();
        AtomicBoolean stopped = new AtomicBoolean();
        Thread[] running = new Thread[producers];
        DefaultMQProducer producer = KillLoad.producer(nameServer);
        for (int i = 0; i < producers; i++) {
            String prefix = i + "-";
            running[i] = new Thread(() -> {
                for (int count = 0; !stopped.get(); count++) {
                    String id = prefix + count;
                    try {
                        Message message = new Message(topic, id.getBytes(StandardCharsets.UTF_8));
                        if (producer.send(message).getSendStatus() == SendStatus.SEND_OK) {
                            acked.add(id);
                            KillLoad.say("ack", id);
                        }
                    } catch (Exception error) {
                        KillLoad.say("unknown", id + " " + error);
                        KillLoad.rest();
                    }
                }
            });
            running[i].start();
        }

        KillLoad.awaitStop();
        stopped.set(true);
        for (Thread each : running) {
            each.join();
        }
        KillLoad.say("stopped", "");
        KillLoad.awaitStop();
        // It gives its queues up in order.
        consumer.shutdown();
        KillLoad.end(new TreeMap<>());
    }

    private static DefaultMQPushConsumer consume(String nameServer, String topic) throws Exception {
        DefaultMQPushConsumer consumer = KillLoad.consumer(nameServer, topic, "kill-orderly", "orderly");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt each : messages) {
                long beginNs = System.nanoTime();
                // Long enough that two consumers of a queue would be seen.
                KillLoad.rest();
                String id = new String(each.getBody(), StandardCharsets.UTF_8);
                KillLoad.say("work", each.getQueueId() + " " + each.getQueueOffset() + " " + beginNs + " "
                        + System.nanoTime() + " " + id);
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        return consumer;
    }
}
