import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Messages that are delivered later, or that a consumer handles only when they come again, or never. "ack ID" is a fact
 * for each one that was acknowledged, "dead ID" for one of these that is never handled.
 */
public final class KilledRetries {
    private static final int RETRIES = 2;
    private static final String DUE = "due";

    private KilledRetries() {
    }

    public static void main(String[] args) throws Exception {
        String nameServer = args[0];
        String topic = args[1];
        String group = args[2];
        int threads = Integer.parseInt(args[3]);
        Set<String> handled = ConcurrentHashMap.newKeySet();
        ConcurrentLinkedQueue<String> early = new ConcurrentLinkedQueue<>();
        AtomicInteger deliveries = new AtomicInteger();
        DefaultMQPushConsumer consumer = KillLoad.consumer(nameServer, topic, group, "retrying");
        consumer.setMaxReconsumeTimes(RETRIES);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            MessageExt message = messages.get(0);
            String id = new String(message.getBody(), StandardCharsets.UTF_8);
            deliveries.incrementAndGet();
            String due = message.getUserProperty(DUE);
            if (due != null && System.currentTimeMillis() < Long.parseLong(due)) {
                early.add(id);
            }
            if (isDead(id) || isRetried(id) && message.getReconsumeTimes() < RETRIES) {
                context.setDelayLevelWhenNextConsume(1);
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            handled.add(id);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();

        DefaultMQProducer producer = KillLoad.producer(nameServer);
        Set<String> acked = ConcurrentHashMap.newKeySet();
        AtomicBoolean stopped = new AtomicBoolean();
        Thread[] running = new Thread[threads];
        for (int i = 0; i < threads; i++) {
            String prefix = i + "-";
            running[i] = new Thread(() -> {
                for (int count = 0; !stopped.get(); count++) {
                    String id = prefix + count;
                    try {
                        if (producer.send(message(topic, id)).getSendStatus() == SendStatus.SEND_OK) {
                            if (!isDead(id)) {
                                acked.add(id);
                            }
                            KillLoad.say(isDead(id) ? "dead" : "ack", id);
                        } else {
                            KillLoad.say("unknown", id);
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
        Map<String, Object> found = new TreeMap<>();
        found.put("all", KillLoad.until(() -> handled.containsAll(acked)));
        List<String> missing = new ArrayList<>(acked);
        missing.removeAll(handled);
        found.put("missing", missing.subList(0, Math.min(20, missing.size())));
        found.put("acked", acked.size());
        found.put("early", new ArrayList<>(early));
        found.put("deliveries", deliveries.get());
        KillLoad.say("stopped", "");
        // It still handles those that come again.
        KillLoad.awaitStop();
        KillLoad.end(found);
    }

    private static int number(String id) {
        return Integer.parseInt(id.substring(id.lastIndexOf('-') + 1));
    }

    private static boolean isRetried(String id) {
        return number(id) % 10 == 3;
    }

    private static boolean isDead(String id) {
        return number(id) % 40 == 7;
    }

    @SuppressWarnings("deprecation")
    private static Message message(String topic, String id) {
        Message message = new Message(topic, id.getBytes(StandardCharsets.UTF_8));
        long nowMs = System.currentTimeMillis();
        if (number(id) % 10 == 6) {
            message.setDelayTimeLevel(1);
            message.putUserProperty(DUE, String.valueOf(nowMs + 1_000));
        } else if (number(id) % 10 == 8) {
            // Timers are exact to a second, and never early.
            message.setDeliverTimeMs(nowMs + 2_000);
            message.putUserProperty(DUE, String.valueOf(nowMs + 2_000));
        }
        return message;
    }
}
