import com.alibaba.fastjson.JSONObject;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/**
 * A name server and a broker that are started as their own programs start them, and clients that consume from them.
 *
 * <p>All of them bind 127.0.0.1 and take free ports, but for the port of replication, which RocketMQ opens everywhere.
 */
final class RealBroker {
    private static final String HOST = "127.0.0.1";
    private static final long SEEK_NANOS = 5_000_000_000L;
    private static final long LIMIT_NANOS = 60_000_000_000L;

    private final JSONObject command;
    private final NamesrvController names;
    private final BrokerController broker;

    RealBroker(JSONObject command) throws Exception {
        this.command = command;
        // As the programs' own main() does: without it a name server takes a broker for a very old one without topics.
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, Integer.toString(MQVersion.CURRENT_VERSION));
        NamesrvConfig namesConfig = new NamesrvConfig();
        namesConfig.setKvConfigPath(command.getString("home") + "/kvConfig.json");
        names = new NamesrvController(namesConfig, server());
        if (!names.initialize()) {
            throw new IllegalStateException("the name server does not initialize");
        }
        names.start();
        MessageStoreConfig store = OpenStore.config(command);
        BrokerConfig settings = new BrokerConfig();
        settings.setBrokerName("broker");
        settings.setBrokerIP1(HOST);
        settings.setNamesrvAddr(address());
        broker = new BrokerController(settings, server(), new NettyClientConfig(), store);
        if (!broker.initialize()) {
            throw new IllegalStateException("the broker does not open this store");
        }
        broker.start();
    }

    private static NettyServerConfig server() {
        NettyServerConfig config = new NettyServerConfig();
        config.setBindAddress(HOST);
        config.setListenPort(0);
        return config;
    }

    private String address() {
        return HOST + ":" + names.getNettyServerConfig().getListenPort();
    }

    void run() throws Exception {
        for (Object each : command.getJSONArray("pull")) {
            JSONObject wish = (JSONObject) each;
            pull(wish.getString("topic"), wish.getIntValue("count"));
        }
        for (Object each : command.getJSONArray("push")) {
            JSONObject wish = (JSONObject) each;
            push(wish.getString("group"), wish.getString("topic"), wish.getIntValue("count"));
        }
        broker.shutdown();
        names.shutdown();
    }

    /**
     * Reads a topic from its first message on until as many came as there should be, and then once more.
     *
     * <p>Each time nothing new came for a while, it begins again: a pull that comes before the broker has loaded a
     * compacted queue moves the consumer to its end, and a seek beside a pull can lose what that pull brings.
     */
    private void pull(String topic, int count) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("pullers");
        consumer.setNamesrvAddr(address());
        consumer.setAutoCommit(false);
        consumer.setPullBatchSize(256);
        consumer.start();
        Collection<MessageQueue> queues = queues(consumer, topic);
        consumer.assign(queues);
        Map<String, MessageExt> found = new LinkedHashMap<>();
        long deadline = System.nanoTime() + LIMIT_NANOS;
        long nextSeek = System.nanoTime();
        while (found.size() < count && System.nanoTime() < deadline) {
            if (System.nanoTime() >= nextSeek) {
                nextSeek = System.nanoTime() + SEEK_NANOS;
                try {
                    for (MessageQueue queue : queues) {
                        consumer.seekToBegin(queue);
                    }
                } catch (MQClientException error) {
                    // On a busy machine the client drops connections. The next seek opens another one.
                    continue;
                }
            }
            if (take(consumer.poll(200), found)) {
                nextSeek = System.nanoTime() + SEEK_NANOS;
            }
        }
        take(consumer.poll(200), found);
        consumer.shutdown();
        for (MessageExt message : found.values()) {
            say("pulled", message);
        }
    }

    /** Keeps messages by their places. Returns: whether one of them is new. */
    private static boolean take(List<MessageExt> messages, Map<String, MessageExt> found) {
        boolean isNew = false;
        for (MessageExt message : messages) {
            String place = message.getQueueId() + ":" + message.getQueueOffset();
            isNew |= found.putIfAbsent(place, message) == null;
        }
        return isNew;
    }

    /** The queues of a topic, once the broker has told the name server of it. */
    private static Collection<MessageQueue> queues(DefaultLitePullConsumer consumer, String topic)
            throws Exception {
        long deadline = System.nanoTime() + LIMIT_NANOS;
        while (true) {
            try {
                return consumer.fetchMessageQueues(topic);
            } catch (MQClientException error) {
                if (System.nanoTime() > deadline) {
                    throw error;
                }
                Thread.sleep(100);
            }
        }
    }

    /** Goes on with a group where it was; its offsets are committed at the end. */
    private void push(String group, String topic, int count) throws Exception {
        Queue<MessageExt> found = new ConcurrentLinkedQueue<>();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(address());
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            found.addAll(messages);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        long deadline = System.nanoTime() + LIMIT_NANOS;
        while (found.size() < count && System.nanoTime() < deadline) {
            Thread.sleep(20);
        }
        consumer.shutdown();
        for (MessageExt message : found) {
            say("pushed", message);
        }
    }

    private static void say(String kind, MessageExt message) {
        JSONObject line = Oracle.line(kind);
        line.put("topic", message.getTopic());
        line.put("queueId", message.getQueueId());
        line.put("offset", message.getQueueOffset());
        line.put("keys", message.getKeys());
        line.put("tags", message.getTags());
        line.put("body", message.getBody());
        Oracle.say(line);
    }
}
