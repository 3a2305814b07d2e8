import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentSkipListMap;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/** The scenarios that a broker of RocketMQ judges: it must make the same lines as RayMQ's server. */
final class ComparedScenarios {
    private ComparedScenarios() {}

    /** Prints a line for each scenario, with its name. */
    public static void main(String[] args) {
        int code = 1;
        try {
            run(args[0], args[1], Integer.parseInt(args[2]));
            code = 0;
        } catch (Throwable error) {
            error.printStackTrace();
        }
        System.exit(code);
    }

    private static void run(String nameServer, String topic, int count) throws Exception {
        String group = "group-" + topic;
        int all = 4 * count + 1;
        say("send", ClientScenarios.send(nameServer, topic, count));
        say("push", ClientScenarios.push(nameServer, topic, all, group + "-all", "*"));
        say("tags", ClientScenarios.push(nameServer, topic, 2 * count, group + "-tags", "sync || batch"));
        String sql = "sql:number < 10 AND TAGS = 'async' AND number IS NOT NULL";
        say("sql", ClientScenarios.push(nameServer, topic, 10, group + "-sql", sql));
        say("pull", ClientScenarios.pull(nameServer, topic, all, group + "-pull"));
        say("wrong sql", wrongSql(nameServer, topic, group + "-wrong"));
        say("broadcast", broadcast(nameServer, topic, all, group + "-broadcast"));
        say("delays", delays(nameServer, topic + "-delays"));
        say("send back", sendBack(nameServer, topic + "-back"));
    }

    private static void say(String name, Map<String, Object> found) {
        found.put("scenario", name);
        System.out.println(ClientScenarios.json(found));
    }

    private static DefaultMQPushConsumer consumer(String nameServer, String group) {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, ClientScenarios.hook());
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    /** An expression that does not parse. */
    private static Map<String, Object> wrongSql(String nameServer, String topic, String group)
            throws Exception {
        DefaultMQPushConsumer consumer = consumer(nameServer, group);
        consumer.subscribe(topic, MessageSelector.bySql("number < AND"));
        consumer.registerMessageListener(
                (MessageListenerConcurrently) (messages, context) -> ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
        Map<String, Object> found = new TreeMap<>();
        try {
            consumer.start();
            found.put("code", "none");
        } catch (MQClientException error) {
            found.put("code", error.getResponseCode());
        }
        consumer.shutdown();
        return found;
    }

    /** Two consumers that each get all messages. */
    private static Map<String, Object> broadcast(String nameServer, String topic, int count, String group)
            throws Exception {
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        Map<String, Integer> seen = new ConcurrentSkipListMap<>();
        for (String name : List.of("one", "two")) {
            DefaultMQPushConsumer consumer = consumer(nameServer, group);
            consumer.setInstanceName(name);
            consumer.setMessageModel(MessageModel.BROADCASTING);
            consumer.subscribe(topic, "*");
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                seen.merge(name, messages.size(), Integer::sum);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            consumers.add(consumer);
        }
        await(() -> seen.values().stream().filter(each -> each >= count).count() == 2);
        consumers.forEach(DefaultMQPushConsumer::shutdown);
        return new TreeMap<>(seen);
    }

    private interface Condition {
        boolean holds();
    }

    private static void await(Condition condition) throws InterruptedException {
        long until = System.nanoTime() + ClientScenarios.WAIT_S * 1_000_000_000L;
        while (!condition.holds() && System.nanoTime() < until) {
            Thread.sleep(20);
        }
    }

    /** Messages that come later: by a level, at a time, after seconds, after milliseconds. */
    private static Map<String, Object> delays(String nameServer, String topic) throws Exception {
        DefaultMQProducer producer = ClientScenarios.producer(nameServer);
        Map<String, Object> found = new TreeMap<>();
        // The topic is made by a message that need not wait.
        producer.send(ClientScenarios.message(topic, "now", 0));
        Map<String, Long> due = new TreeMap<>();
        for (String kind : List.of("level", "time", "seconds", "milliseconds", "past")) {
            Message message = ClientScenarios.message(topic, kind, 1);
            long now = System.currentTimeMillis();
            long delay = kind.equals("past") ? -1_000 : kind.equals("milliseconds") ? 1_500 : 1_000;
            switch (kind) {
                case "level" -> message.setDelayTimeLevel(1);
                case "seconds" -> message.setDelayTimeSec(1);
                case "milliseconds" -> message.setDelayTimeMs(delay);
                default -> message.setDeliverTimeMs(now + delay);
            }
            due.put(kind, now + delay);
            found.put("sent " + kind, producer.send(message).getSendStatus().name());
        }
        BlockingQueue<MessageExt> taken = new LinkedBlockingQueue<>();
        DefaultMQPushConsumer consumer = consumer(nameServer, "group-" + topic);
        consumer.subscribe(topic, "*");
        Map<String, Boolean> early = new ConcurrentSkipListMap<>();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt each : messages) {
                // A timer of RocketMQ has a precision of 1 s, and delivers up to one early.
                early.put(each.getTags(),
                        System.currentTimeMillis() < due.getOrDefault(each.getTags(), 0L) - 1_000);
            }
            taken.addAll(messages);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        for (int i = 0; i < due.size() + 1; i++) {
            MessageExt each = taken.poll(ClientScenarios.WAIT_S, TimeUnit.SECONDS);
            if (each != null) {
                found.put("got " + each.getTags(), facts(each));
            }
        }
        found.put("early", early);
        consumer.shutdown();
        producer.shutdown();
        return found;
    }

    /** What a consumer can see of a message, but for what differs from run to run. */
    private static Map<String, Object> facts(MessageExt message) {
        Map<String, Object> found = new TreeMap<>();
        found.put("topic", message.getTopic());
        found.put("tags", message.getTags());
        found.put("keys", message.getKeys());
        found.put("flag", message.getFlag());
        found.put("system flag", message.getSysFlag());
        found.put("body", new String(message.getBody(), StandardCharsets.UTF_8));
        found.put("properties", new TreeSet<>(message.getProperties().keySet()));
        found.put("reconsumed", message.getReconsumeTimes());
        found.put("number", message.getUserProperty("number"));
        return found;
    }

    /** Messages that a consumer sends back twice, until it takes them. */
    private static Map<String, Object> sendBack(String nameServer, String topic) throws Exception {
        DefaultMQProducer producer = ClientScenarios.producer(nameServer);
        for (int i = 0; i < 4; i++) {
            producer.send(ClientScenarios.message(topic, "back", i));
        }
        producer.shutdown();
        Map<String, Object> seen = new ConcurrentSkipListMap<>();
        DefaultMQPushConsumer consumer = consumer(nameServer, "group-" + topic);
        consumer.subscribe(topic, "back");
        Map<String, Boolean> taken = new ConcurrentSkipListMap<>();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            MessageExt message = messages.get(0);
            seen.put(message.getKeys() + " " + message.getReconsumeTimes(), facts(message));
            if (message.getReconsumeTimes() == 2) {
                taken.put(message.getKeys(), true);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
            context.setDelayLevelWhenNextConsume(1);
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        await(() -> taken.size() == 4);
        consumer.shutdown();
        return new TreeMap<>(seen);
    }
}
