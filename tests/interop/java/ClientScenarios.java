import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentSkipListMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;

/** What users do with RocketMQ's own client, each as one scenario that prints one line of JSON. */
public class ClientScenarios {
    static final int WAIT_S = 60;

    public static void main(String[] args) {
        int code = 1;
        try {
            run(args);
            code = 0;
        } catch (Throwable error) {
            error.printStackTrace();
        }
        // Threads of a client that was not shut down would keep the process.
        System.exit(code);
    }

    private static void run(String[] args) throws Exception {
        String scenario = args[0];
        String nameServer = args[1];
        String topic = args[2];
        int count = Integer.parseInt(args[3]);
        Map<String, Object> found = switch (scenario) {
            case "send" -> send(nameServer, topic, count);
            case "push" -> push(nameServer, topic, count, args[4], args[5]);
            case "transact" -> transact(nameServer, topic, count);
            case "answer" -> answer(nameServer, topic, count, args[4]);
            case "orderly" -> orderly(nameServer, topic, count, args[4]);
            case "pull" -> pull(nameServer, topic, count, args[4]);
            case "back" -> back(nameServer, topic, count, args[4]);
            case "share" -> share(nameServer, topic, args[4]);
            default -> throw new IllegalArgumentException(scenario);
        };
        System.out.println(json(found));
    }

    /** Signs requests as users of RocketMQ's access control do. */
    static RPCHook hook() {
        return new AclClientRPCHook(new SessionCredentials("raymq", System.getProperty("raymq.secret")));
    }

    /** With what both 4.9 and 5.3 have: this file is compiled with either. */
    static DefaultMQPushConsumer pushConsumer(String group) {
        return new DefaultMQPushConsumer(group, hook(), new AllocateMessageQueueAveragely());
    }

    static DefaultMQProducer producer(String nameServer) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("scenario-producers", hook());
        producer.setNamesrvAddr(nameServer);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        return producer;
    }

    /** Sync, async, one-way and batch; large bodies, which the client compresses. */
    static Map<String, Object> send(String nameServer, String topic, int count)
            throws Exception {
        DefaultMQProducer producer = producer(nameServer);
        Map<String, Integer> offsets = new TreeMap<>();
        Map<String, Object> found = new TreeMap<>();
        for (int i = 0; i < count; i++) {
            Message message = message(topic, "sync", i);
            SendResult sent = producer.send(message);
            offsets.merge(sent.getSendStatus().name(), 1, Integer::sum);
            if (i == 0) {
                found.put("queue", sent.getMessageQueue().getBrokerName());
                found.put("offset_id_length", sent.getOffsetMsgId().length());
                found.put("has_unique_id", sent.getMsgId().equals(message.getProperty("UNIQ_KEY")));
            }
        }
        CountDownLatch done = new CountDownLatch(count);
        AtomicInteger failed = new AtomicInteger();
        for (int i = 0; i < count; i++) {
            producer.send(message(topic, "async", i), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    done.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    failed.incrementAndGet();
                    done.countDown();
                }
            });
        }
        found.put("async_answered", done.await(WAIT_S, TimeUnit.SECONDS));
        found.put("async_failed", failed.get());
        for (int i = 0; i < count; i++) {
            producer.sendOneway(message(topic, "oneway", i));
        }
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            batch.add(message(topic, "batch", i));
        }
        SendResult sent = producer.send(batch);
        found.put("batch", sent.getSendStatus().name());
        found.put("batch_ids", sent.getMsgId().split(",").length);
        Message large = message(topic, "large", 0);
        large.setBody("0123456789".repeat(20_000).getBytes(StandardCharsets.UTF_8));
        found.put("large", producer.send(large).getSendStatus().name());
        found.put("sync", offsets);
        producer.shutdown();
        return found;
    }

    static Message message(String topic, String tag, int number) {
        Message message = new Message(topic, tag, "key-" + tag + "-" + number,
                (tag + "-" + number).getBytes(StandardCharsets.UTF_8));
        message.setFlag(number);
        message.putUserProperty("number", String.valueOf(number));
        return message;
    }

    /** Half messages that are committed, rolled back, or committed when the server asks: a third of each. */
    private static Map<String, Object> transact(String nameServer, String topic, int count)
            throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer("scenario-payers", hook());
        producer.setNamesrvAddr(nameServer);
        producer.setSendMsgTimeout(10_000);
        Map<String, String> executed = new ConcurrentHashMap<>();
        Map<String, String> checked = new ConcurrentHashMap<>();
        AtomicInteger wrong = new AtomicInteger();
        CountDownLatch asked = new CountDownLatch(count / 3);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object number) {
                executed.put(message.getTransactionId(), message.getKeys());
                return switch ((int) number % 3) {
                    case 0 -> LocalTransactionState.COMMIT_MESSAGE;
                    case 1 -> LocalTransactionState.ROLLBACK_MESSAGE;
                    default -> LocalTransactionState.UNKNOW;
                };
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                String body = new String(message.getBody(), StandardCharsets.UTF_8);
                boolean isSame = message.getTopic().equals(topic) && message.getTags().equals("half")
                        && message.getKeys().equals(executed.get(message.getTransactionId()))
                        && message.getKeys().equals("key-" + body)
                        && message.getFlag() == Integer.parseInt(message.getUserProperty("number"));
                if (!isSame || checked.put(message.getTransactionId(), body) != null) {
                    wrong.incrementAndGet();
                }
                asked.countDown();
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        Map<String, Integer> states = new TreeMap<>();
        for (int i = 0; i < count; i++) {
            SendResult sent = producer.sendMessageInTransaction(message(topic, "half", i), i);
            states.merge(sent.getSendStatus().name(), 1, Integer::sum);
            if (!executed.containsKey(sent.getTransactionId())) {
                wrong.incrementAndGet();
            }
        }
        Map<String, Object> found = new TreeMap<>();
        found.put("asked", asked.await(WAIT_S, TimeUnit.SECONDS));
        // The answers go one-way.
        Thread.sleep(1_000);
        producer.shutdown();
        found.put("checked", checked.size());
        found.put("states", states);
        found.put("wrong", wrong.get());
        return found;
    }

    /** Commits so many half messages of another client of the group, and leaves as many of its own to that client. */
    private static Map<String, Object> answer(String nameServer, String topic, int count, String group)
            throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group, hook());
        producer.setNamesrvAddr(nameServer);
        producer.setSendMsgTimeout(10_000);
        Map<String, String> checked = new ConcurrentHashMap<>();
        AtomicInteger wrong = new AtomicInteger();
        CountDownLatch asked = new CountDownLatch(count);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object number) {
                return LocalTransactionState.UNKNOW;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                if (message.getTags().equals("half")) {
                    return LocalTransactionState.UNKNOW;
                }
                String body = new String(message.getBody(), StandardCharsets.UTF_8);
                boolean isWhole = message.getTopic().equals(topic) && message.getTags().equals("ours")
                        && message.getKeys().equals("key-" + body)
                        && body.equals("ours-" + message.getUserProperty("number"))
                        && message.getTransactionId().length() == 32;
                if (!isWhole) {
                    wrong.incrementAndGet();
                }
                if (checked.put(message.getTransactionId(), body) == null) {
                    asked.countDown();
                }
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        Map<String, Integer> states = new TreeMap<>();
        for (int i = 0; i < count; i++) {
            SendResult sent = producer.sendMessageInTransaction(message(topic, "half", i), i);
            states.merge(sent.getSendStatus().name(), 1, Integer::sum);
        }
        Map<String, Object> found = new TreeMap<>();
        found.put("asked", asked.await(WAIT_S, TimeUnit.SECONDS));
        // The answers go one-way.
        Thread.sleep(1_000);
        producer.shutdown();
        found.put("checked", new TreeSet<>(checked.keySet()));
        found.put("states", states);
        found.put("wrong", wrong.get());
        return found;
    }

    /** A push consumer that reads so many messages from the begin. */
    static Map<String, Object> push(String nameServer, String topic, int count, String group,
            String expression) throws Exception {
        DefaultMQPushConsumer consumer = pushConsumer(group);
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        if (expression.startsWith("sql:")) {
            consumer.subscribe(topic, MessageSelector.bySql(expression.substring(4)));
        } else {
            consumer.subscribe(topic, expression);
        }
        Map<String, Integer> seen = new ConcurrentHashMap<>();
        Map<String, Integer> bytes = new ConcurrentSkipListMap<>();
        TreeSet<String> queues = new TreeSet<>();
        AtomicInteger received = new AtomicInteger();
        CountDownLatch enough = new CountDownLatch(count);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt each : messages) {
                seen.merge(each.getTags() + "/" + each.getKeys(), 1, Integer::sum);
                bytes.merge(each.getTags(), each.getBody().length, Integer::sum);
                synchronized (queues) {
                    queues.add(each.getBrokerName() + "/" + each.getQueueId());
                }
                received.incrementAndGet();
                enough.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        boolean all = enough.await(WAIT_S, TimeUnit.SECONDS);
        Thread.sleep(500);
        consumer.shutdown();
        Map<String, Object> found = new TreeMap<>();
        found.put("all", all);
        found.put("received", received.get());
        found.put("distinct", seen.size());
        found.put("bytes", bytes);
        found.put("queues", queues);
        return found;
    }

    /**
     * Two consumers in order, of which one is shut down when half of the messages were handled. Each message has its number
     * in its queue.
     */
    private static Map<String, Object> orderly(String nameServer, String topic, int count, String group)
            throws Exception {
        Map<String, Integer> last = new ConcurrentHashMap<>();
        Map<String, String> busy = new ConcurrentHashMap<>();
        Map<String, AtomicInteger> handled = new ConcurrentSkipListMap<>();
        AtomicInteger wrong = new AtomicInteger();
        AtomicInteger repeated = new AtomicInteger();
        AtomicInteger together = new AtomicInteger();
        CountDownLatch half = new CountDownLatch(count / 2);
        CountDownLatch all = new CountDownLatch(count);
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (String name : List.of("first", "second")) {
            handled.put(name, new AtomicInteger());
            DefaultMQPushConsumer consumer = pushConsumer(group);
            consumer.setNamesrvAddr(nameServer);
            consumer.setInstanceName(name);
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            // A message that is being handled is finished before its queue is unlocked.
            consumer.setAwaitTerminationMillisWhenShutdown(5_000);
            consumer.subscribe(topic, "*");
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                MessageQueue queue = context.getMessageQueue();
                String place = queue.getBrokerName() + "/" + queue.getQueueId();
                if (busy.put(place, name) != null) {
                    together.incrementAndGet();
                }
                for (MessageExt each : messages) {
                    int number = Integer.parseInt(each.getUserProperty("number"));
                    int before = last.getOrDefault(place, -1);
                    if (number == before + 1) {
                        last.put(place, number);
                        handled.get(name).incrementAndGet();
                        half.countDown();
                        all.countDown();
                    } else if (number <= before) {
                        repeated.incrementAndGet();
                    } else {
                        wrong.incrementAndGet();
                    }
                }
                busy.remove(place);
                return ConsumeOrderlyStatus.SUCCESS;
            });
            consumers.add(consumer);
            consumer.start();
        }
        DefaultMQProducer producer = producer(nameServer);
        List<MessageQueue> queues = producer.fetchPublishMessageQueues(topic);
        Map<String, Object> found = new TreeMap<>();
        for (int i = 0; i < count; i++) {
            producer.send(message(topic, "order", i / queues.size()), queues.get(i % queues.size()));
            Thread.sleep(5);
            if (i == count / 2 + count / 4) {
                found.put("half", half.await(WAIT_S, TimeUnit.SECONDS));
                consumers.get(0).shutdown();
            }
        }
        found.put("all", all.await(WAIT_S, TimeUnit.SECONDS));
        consumers.get(1).shutdown();
        producer.shutdown();
        found.put("by_first", handled.get("first").get());
        found.put("by_second", handled.get("second").get());
        found.put("queues", queues.size());
        found.put("wrong", wrong.get());
        found.put("repeated", repeated.get());
        found.put("together", together.get());
        return found;
    }

    /** A push consumer that sends each message back once. */
    private static Map<String, Object> back(String nameServer, String topic, int count, String group)
            throws Exception {
        DefaultMQPushConsumer consumer = pushConsumer(group);
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "sync");
        Map<String, Integer> times = new ConcurrentSkipListMap<>();
        CountDownLatch enough = new CountDownLatch(count);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            MessageExt message = messages.get(0);
            times.merge(message.getReconsumeTimes() + " of " + message.getTopic(), 1, Integer::sum);
            if (message.getReconsumeTimes() > 0) {
                enough.countDown();
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
            context.setDelayLevelWhenNextConsume(1);
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        boolean all = enough.await(WAIT_S, TimeUnit.SECONDS);
        consumer.shutdown();
        Map<String, Object> found = new TreeMap<>();
        found.put("all", all);
        found.put("times", times);
        return found;
    }

    /** A push consumer that reads its share of the queues until its input ends. */
    private static Map<String, Object> share(String nameServer, String topic, String group) throws Exception {
        DefaultMQPushConsumer consumer = pushConsumer(group);
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        Map<String, Integer> queues = new ConcurrentSkipListMap<>();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt each : messages) {
                queues.merge(each.getBrokerName() + "/" + each.getQueueId(), 1, Integer::sum);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        System.in.readAllBytes();
        consumer.shutdown();
        return new TreeMap<>(queues);
    }

    /**
     * A lite pull consumer that has all queues assigned.
     *
     * <p>It does not seek. A seek interrupts the pull that is under way. The client then closes the connection that all
     * its threads share, so other requests fail, or it loses what that pull has brought.
     */
    static Map<String, Object> pull(String nameServer, String topic, int count, String group)
            throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group, hook());
        consumer.setNamesrvAddr(nameServer);
        consumer.setAutoCommit(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.start();
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchMessageQueues(topic));
        consumer.assign(queues);
        TreeSet<String> seen = new TreeSet<>();
        long until = System.currentTimeMillis() + WAIT_S * 1000L;
        while (seen.size() < count && System.currentTimeMillis() < until) {
            for (MessageExt each : consumer.poll(1_000)) {
                seen.add(each.getTags() + "/" + each.getKeys());
            }
        }
        consumer.commit(new HashSet<>(queues), true);
        consumer.shutdown();
        Map<String, Object> found = new TreeMap<>();
        found.put("distinct", seen.size());
        found.put("queues", queues.size());
        return found;
    }

    @SuppressWarnings("unchecked")
    static String json(Object value) {
        if (value instanceof Map<?, ?> map) {
            List<String> parts = new ArrayList<>();
            for (Map.Entry<?, ?> each : new TreeMap<>((Map<String, Object>) map).entrySet()) {
                parts.add("\"" + each.getKey() + "\":" + json(each.getValue()));
            }
            return "{" + String.join(",", parts) + "}";
        }
        if (value instanceof Iterable<?> list) {
            List<String> parts = new ArrayList<>();
            for (Object each : list) {
                parts.add(json(each));
            }
            return "[" + String.join(",", parts) + "]";
        }
        return value instanceof String ? "\"" + value + "\"" : String.valueOf(value);
    }
}
