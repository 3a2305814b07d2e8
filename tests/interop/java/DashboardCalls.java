import java.nio.charset.StandardCharsets;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.protocol.admin.ConsumeStats;
import org.apache.rocketmq.remoting.protocol.admin.TopicOffset;
import org.apache.rocketmq.remoting.protocol.body.ClusterInfo;
import org.apache.rocketmq.remoting.protocol.body.Connection;
import org.apache.rocketmq.remoting.protocol.body.ConsumerConnection;
import org.apache.rocketmq.remoting.protocol.body.ConsumerRunningInfo;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import org.apache.rocketmq.tools.admin.api.MessageTrack;

/** The calls of RocketMQ Dashboard's backend, as plain values. Queues are shown as "broker/number". */
@SuppressWarnings("deprecation")
final class DashboardCalls {
    private static final long TIMEOUT_MS = 10_000;

    private final DefaultMQAdminExt admin;
    private final String nameServer;
    private final RPCHook hook;

    DashboardCalls(String nameServer, RPCHook hook) throws Exception {
        this.nameServer = nameServer;
        this.hook = hook;
        admin = new DefaultMQAdminExt(hook, 5_000);
        admin.setNamesrvAddr(nameServer);
        admin.setInstanceName("dashboard");
        admin.start();
    }

    Object call(String name, List<Object> words) throws Exception {
        String first = words.isEmpty() ? "" : words.get(0).toString();
        String second = words.size() < 2 ? "" : words.get(1).toString();
        String third = words.size() < 3 ? "" : words.get(2).toString();
        switch (name) {
            case "brokers":
                return brokers();
            case "topics":
                return new TreeSet<>(admin.fetchAllTopicList().getTopicList());
            case "systemTopics":
                return client().getSystemTopicList(TIMEOUT_MS).getTopicList();
            case "clustersOfTopic":
                return admin.getTopicClusterList(first);
            case "topicConfigs":
                return queuesOf(admin.getAllTopicConfig(first, TIMEOUT_MS).getTopicConfigTable().values());
            case "topicConfig":
                return queuesOf(List.of(admin.examineTopicConfig(first, second)));
            case "topicStats":
                return topicStats(first);
            case "route":
                return admin.examineTopicRouteInfo(first).getQueueDatas().size();
            case "groups":
                return new TreeSet<>(
                    admin.getAllSubscriptionGroup(first, TIMEOUT_MS).getSubscriptionGroupTable().keySet());
            case "groupConfig":
                return admin.examineSubscriptionGroupConfig(first, second).getRetryMaxTimes();
            case "groupsOfTopic":
                return new TreeSet<>(admin.queryTopicConsumeByWho(first).getGroupList());
            case "topicsOfGroup":
                return new TreeSet<>(admin.queryTopicsByConsumer(first).getTopicList());
            case "consumeStats":
                return offsets(second.isEmpty()
                    ? admin.examineConsumeStats(first) : admin.examineConsumeStats(first, second));
            case "consumeStatsOfBroker":
                return offsets(admin.examineConsumeStats(first, second, null, 3_000));
            case "connections":
                return connections(first);
            case "producers":
                return clientIds(admin.examineProducerConnectionInfo(first, second).getConnectionSet());
            case "runningInfo":
                return running(admin.getConsumerRunningInfo(first, second, "true".equals(third)));
            case "consumeStatus":
                return status(first, second);
            case "runtime":
                return admin.fetchBrokerRuntimeStats(first).getTable();
            case "brokerConfig":
                return admin.getBrokerConfig(first);
            case "stats":
                return admin.viewBrokerStatsData(first, second, third);
            case "byKey":
                return bodies(admin.queryMessage(first, second, 64, 0, System.currentTimeMillis()).getMessageList());
            case "byId":
                return body(admin.viewMessage(first, second));
            case "byTopic":
                return byTopic(first);
            case "track":
                return track(admin.viewMessage(first, second));
            case "consumeDirectly":
                return admin.consumeMessageDirectly(first, second, third, words.get(3).toString())
                    .getConsumeResult().name();
            case "earliest":
                return admin.earliestMsgStoreTime(new MessageQueue(first, second, Integer.parseInt(third)));
            case "createTopic":
                admin.createAndUpdateTopicConfig(first, new TopicConfig(second, 2, 2));
                return null;
            case "deleteTopic":
                admin.deleteTopicInBroker(Set.of(first), second);
                admin.deleteTopicInNameServer(Set.of(nameServer), second);
                return null;
            case "createGroup":
                SubscriptionGroupConfig config = new SubscriptionGroupConfig();
                config.setGroupName(second);
                admin.createAndUpdateSubscriptionGroupConfig(first, config);
                return null;
            case "deleteGroup":
                admin.deleteSubscriptionGroup(first, second, true);
                return null;
            case "reset":
                return queues(admin.resetOffsetByTimestamp(first, second, Long.parseLong(third), true));
            default:
                throw new IllegalArgumentException(name);
        }
    }

    private MQClientAPIImpl client() {
        return admin.getDefaultMQAdminExtImpl().getMqClientInstance().getMQClientAPIImpl();
    }

    private static String queue(MessageQueue queue) {
        return queue.getTopic() + "/" + queue.getBrokerName() + "/" + queue.getQueueId();
    }

    private static Map<String, Long> queues(Map<MessageQueue, Long> table) {
        Map<String, Long> found = new TreeMap<>();
        table.forEach((queue, offset) -> found.put(queue(queue), offset));
        return found;
    }

    private Map<String, Object> brokers() throws Exception {
        ClusterInfo info = admin.examineBrokerClusterInfo();
        Map<String, Object> found = new TreeMap<>();
        found.put("clusters", info.getClusterAddrTable());
        Map<String, String> addresses = new TreeMap<>();
        info.getBrokerAddrTable().forEach((name, broker) -> addresses.put(name, broker.selectBrokerAddr()));
        found.put("addresses", addresses);
        return found;
    }

    private static Map<String, Integer> queuesOf(Collection<TopicConfig> configs) {
        Map<String, Integer> found = new TreeMap<>();
        configs.forEach(each -> found.put(each.getTopicName(), each.getWriteQueueNums()));
        return found;
    }

    private Map<String, List<Long>> topicStats(String topic) throws Exception {
        Map<String, List<Long>> found = new TreeMap<>();
        for (Map.Entry<MessageQueue, TopicOffset> each : admin.examineTopicStats(topic).getOffsetTable().entrySet()) {
            TopicOffset offset = each.getValue();
            found.put(queue(each.getKey()),
                List.of(offset.getMinOffset(), offset.getMaxOffset(), offset.getLastUpdateTimestamp()));
        }
        return found;
    }

    private static Map<String, List<Long>> offsets(ConsumeStats stats) {
        Map<String, List<Long>> found = new TreeMap<>();
        stats.getOffsetTable().forEach((queue, offset) ->
            found.put(queue(queue), List.of(offset.getConsumerOffset(), offset.getBrokerOffset())));
        return found;
    }

    private static Set<String> clientIds(Set<Connection> connections) {
        Set<String> found = new TreeSet<>();
        connections.forEach(each -> found.add(each.getClientId() + " " + each.getLanguage()));
        return found;
    }

    private Map<String, Object> connections(String group) throws Exception {
        ConsumerConnection connection = admin.examineConsumerConnectionInfo(group);
        Map<String, Object> found = new TreeMap<>();
        found.put("clients", clientIds(connection.getConnectionSet()));
        found.put("type", connection.getConsumeType().name());
        found.put("model", connection.getMessageModel().name());
        found.put("from", connection.getConsumeFromWhere().name());
        found.put("topics", new TreeSet<>(connection.getSubscriptionTable().keySet()));
        return found;
    }

    private static Map<String, Object> running(ConsumerRunningInfo info) {
        Map<String, Object> found = new TreeMap<>();
        Set<String> queues = new TreeSet<>();
        info.getMqTable().keySet().forEach(each -> queues.add(queue(each)));
        found.put("queues", queues);
        found.put("type", info.getProperties().getProperty(ConsumerRunningInfo.PROP_CONSUME_TYPE));
        found.put("hasThreads", info.getJstack() != null && !info.getJstack().isEmpty());
        return found;
    }

    private Map<String, Object> status(String topic, String group) throws Exception {
        Map<String, Object> found = new TreeMap<>();
        admin.getConsumeStatus(topic, group, "").forEach((client, offsets) -> found.put(client, queues(offsets)));
        return found;
    }

    private static String body(MessageExt message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    private static Set<String> bodies(List<MessageExt> messages) {
        Set<String> found = new TreeSet<>();
        messages.forEach(each -> found.add(body(each)));
        return found;
    }

    private Map<String, String> track(MessageExt message) throws Exception {
        Map<String, String> found = new TreeMap<>();
        for (MessageTrack each : admin.messageTrackDetail(message)) {
            found.put(each.getConsumerGroup(), each.getTrackType().name());
        }
        return found;
    }

    /** The messages of a topic up to now, as the page of messages reads them. */
    private Set<String> byTopic(String topic) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("TOOLS_CONSUMER", hook);
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName("page");
        consumer.start();
        try {
            Set<String> found = new TreeSet<>();
            for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
                long offset = consumer.searchOffset(queue, 0);
                long end = consumer.searchOffset(queue, System.currentTimeMillis());
                while (offset <= end) {
                    PullResult pulled = consumer.pull(queue, "*", offset, 32);
                    if (pulled.getMsgFoundList() == null) {
                        break;
                    }
                    found.addAll(bodies(pulled.getMsgFoundList()));
                    offset = pulled.getNextBeginOffset();
                }
            }
            return found;
        } finally {
            consumer.shutdown();
        }
    }
}
