import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Producers of transactions, and perhaps a consumer. Even numbers are committed, odd ones rolled back. Half of the
 * producers' answers are "unknown", so that the server has to ask.
 *
 * <p>Facts: "commit ID" and "rollback ID" when a local transaction has decided so, "unknown ID" when the half message
 * has no answer, "seen ID" when the consumer gets a message first.
 */
public final class KilledTransactions {
    private static final int SEND_TIMEOUT_MS = 3_000;

    private KilledTransactions() {
    }

    public static void main(String[] args) throws Exception {
        String nameServer = args[0];
        String topic = args[1];
        String name = args[2];
        int threads = Integer.parseInt(args[3]);
        boolean consumes = Boolean.parseBoolean(args[4]);

        Map<String, Integer> seen = new ConcurrentHashMap<>();
        if (consumes) {
            consume(nameServer, topic, seen);
        }
        Set<String> executed = ConcurrentHashMap.newKeySet();
        Set<String> pending = ConcurrentHashMap.newKeySet();
        Set<String> committed = ConcurrentHashMap.newKeySet();
        TransactionMQProducer producer = new TransactionMQProducer("kill-payers", KillLoad.hook());
        producer.setNamesrvAddr(nameServer);
        producer.setInstanceName(name);
        producer.setSendMsgTimeout(SEND_TIMEOUT_MS);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object number) {
                String id = new String(message.getBody(), StandardCharsets.UTF_8);
                LocalTransactionState state = decision(id);
                if (state == LocalTransactionState.COMMIT_MESSAGE) {
                    committed.add(id);
                }
                executed.add(id);
                KillLoad.say(state == LocalTransactionState.COMMIT_MESSAGE ? "commit" : "rollback", id);
                return (int) number % 4 < 2 ? state : LocalTransactionState.UNKNOW;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                String id = new String(message.getBody(), StandardCharsets.UTF_8);
                KillLoad.say("checked", id);
                // First: a local transaction that ends from here on is among the executed ones.
                boolean isPending = pending.contains(id);
                if (!id.startsWith(name + "-") || executed.contains(id)) {
                    return decision(id);
                }
                // Without an answer to the half message, its local transaction does not begin.
                return isPending ? LocalTransactionState.UNKNOW : LocalTransactionState.ROLLBACK_MESSAGE;
            }
        });
        producer.start();

        AtomicBoolean stopped = new AtomicBoolean();
        Thread[] running = new Thread[threads];
        for (int i = 0; i < threads; i++) {
            String prefix = name + "-" + i + "-";
            running[i] = new Thread(() -> {
                for (int count = 0; !stopped.get(); count++) {
                    String id = prefix + count;
                    pending.add(id);
                    try {
                        Message message = new Message(topic, id.getBytes(StandardCharsets.UTF_8));
                        producer.sendMessageInTransaction(message, count);
                    } catch (Exception error) {
                        // The client does not say whether its local transaction has begun.
                        KillLoad.say("failed", id + " " + error);
                        KillLoad.rest();
                    }
                    if (!executed.contains(id)) {
                        KillLoad.say("unknown", id);
                    }
                    pending.remove(id);
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
        found.put("all", !consumes || KillLoad.until(() -> seen.keySet().containsAll(committed)));
        found.put("rolled_back_seen", seen.keySet().stream().filter(each -> !isCommitted(each)).toList());
        found.put("committed", committed.size());
        found.put("deliveries", seen.values().stream().mapToInt(Integer::intValue).sum());
        KillLoad.say("stopped", ClientScenarios.json(found));
        // It still answers what the server asks.
        KillLoad.awaitStop();
        found.put("rolled_back_seen", seen.keySet().stream().filter(each -> !isCommitted(each)).toList());
        KillLoad.end(found);
    }

    private static boolean isCommitted(String id) {
        return Integer.parseInt(id.substring(id.lastIndexOf('-') + 1)) % 2 == 0;
    }

    private static LocalTransactionState decision(String id) {
        return isCommitted(id) ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
    }

    private static void consume(String nameServer, String topic, Map<String, Integer> seen) throws Exception {
        DefaultMQPushConsumer consumer = KillLoad.consumer(nameServer, topic, "kill-readers", "reader");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt each : messages) {
                String id = new String(each.getBody(), StandardCharsets.UTF_8);
                if (seen.merge(id, 1, Integer::sum) == 1) {
                    KillLoad.say("seen", id);
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
    }
}
