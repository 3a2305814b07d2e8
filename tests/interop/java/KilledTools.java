import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.Callable;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.protocol.admin.ConsumeStats;
import org.apache.rocketmq.remoting.protocol.body.ClusterInfo;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.remoting.protocol.route.QueueData;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * An operator that makes topics, writes, asks, resets offsets and deletes, and asks again after an error until it is
 * done. "done STEP" is a fact for each step.
 */
public final class KilledTools {
    private static final int QUEUES = 4;
    private static final String GROUP = "kill-reset";

    private final DefaultMQAdminExt admin;
    private final DefaultMQProducer producer;
    private final List<String> faults = new ArrayList<>();
    private int steps;
    private int errors;

    private KilledTools(String nameServer) throws Exception {
        admin = new DefaultMQAdminExt(KillLoad.hook(), 5_000);
        admin.setNamesrvAddr(nameServer);
        admin.setInstanceName("tools");
        admin.start();
        producer = KillLoad.producer(nameServer);
    }

    public static void main(String[] args) throws Exception {
        KilledTools tools = new KilledTools(args[0]);
        AtomicBoolean stopped = new AtomicBoolean();
        Thread running = new Thread(() -> {
            for (int round = 0; !stopped.get() && tools.faults.isEmpty(); round++) {
                try {
                    tools.round("made-" + round);
                } catch (Throwable error) {
                    tools.faults.add(error.toString().replace('"', '\''));
                }
            }
        });
        running.start();
        KillLoad.awaitStop();
        stopped.set(true);
        running.join();
        Map<String, Object> found = new TreeMap<>();
        found.put("steps", tools.steps);
        found.put("errors", tools.errors);
        found.put("faults", tools.faults);
        KillLoad.end(found);
    }

    private void round(String topic) throws Exception {
        again("create group", () -> {
            SubscriptionGroupConfig config = new SubscriptionGroupConfig();
            config.setGroupName(GROUP);
            admin.createAndUpdateSubscriptionGroupConfig(leader(), config);
            return true;
        });
        again("create", () -> {
            admin.createAndUpdateTopicConfig(leader(), new TopicConfig(topic, QUEUES, QUEUES));
            return true;
        });
        again("route", () -> {
            int queues = 0;
            for (QueueData each : admin.examineTopicRouteInfo(topic).getQueueDatas()) {
                queues += each.getReadQueueNums();
            }
            require(queues == QUEUES, topic + " has " + queues + " queues");
            return true;
        });
        SendResult sent = again("send", () -> producer.send(
                new Message(topic, "", topic + "-key", topic.getBytes(StandardCharsets.UTF_8))));
        again("query key", () -> {
            QueryResult found = admin.queryMessage(topic, topic + "-key", 32, 0, Long.MAX_VALUE);
            require(!found.getMessageList().isEmpty(), "nothing has the key of " + topic);
            return true;
        });
        again("view", () -> {
            byte[] body = admin.viewMessage(topic, sent.getOffsetMsgId()).getBody();
            require(new String(body, StandardCharsets.UTF_8).equals(topic), "another body of " + topic);
            return true;
        });
        again("reset", () -> admin.resetOffsetByTimestamp(topic, GROUP, 0, true));
        again("progress", () -> {
            ConsumeStats stats = admin.examineConsumeStats(GROUP, topic);
            long left = stats.computeTotalDiff();
            require(stats.getOffsetTable().size() == QUEUES, "offsets of " + stats.getOffsetTable().size());
            require(left >= 1, left + " messages left after a reset");
            return true;
        });
        again("delete", () -> {
            admin.deleteTopicInBroker(Set.of(leader()), topic);
            admin.deleteTopicInNameServer(Set.of(admin.getNamesrvAddr()), topic);
            return true;
        });
        again("gone", () -> {
            try {
                admin.examineTopicRouteInfo(topic);
            } catch (MQClientException error) {
                if (error.getResponseCode() == 17) {
                    return true;
                }
                throw error;
            }
            throw new IllegalStateException(topic + " is still there");
        });
    }

    private String leader() throws Exception {
        ClusterInfo found = admin.examineBrokerClusterInfo();
        BrokerData broker = found.getBrokerAddrTable().get("raymq-0");
        return broker.getBrokerAddrs().get(0L);
    }

    private static void require(boolean holds, String text) {
        if (!holds) {
            throw new IllegalStateException(text);
        }
    }

    /** Asks again after each error, for a while. */
    private <T> T again(String step, Callable<T> work) throws Exception {
        long end = System.currentTimeMillis() + KillLoad.WAIT_MS;
        while (true) {
            try {
                T found = work.call();
                steps++;
                KillLoad.say("done", step);
                return found;
            } catch (Exception error) {
                errors++;
                KillLoad.say("error", step + ": " + error + (error instanceof MQBrokerException broker
                        ? " " + broker.getResponseCode() : ""));
                if (System.currentTimeMillis() > end) {
                    throw new IllegalStateException(step + ": " + error, error);
                }
                Thread.sleep(200);
            }
        }
    }
}
