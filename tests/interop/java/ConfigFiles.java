import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;

/**
 * The broker's configuration files: "write" makes them from the command, else they are read by the broker's own managers.
 */
final class ConfigFiles {
    private final JSONObject command;

    ConfigFiles(JSONObject command) {
        this.command = command;
    }

    void run() throws Exception {
        OpenStore open = new OpenStore(command);
        BrokerController broker = open.broker;
        if (command.containsKey("topics")) {
            write(broker);
            return;
        }
        JSONObject line = Oracle.line("config");
        line.put("topicsLoaded", broker.getTopicConfigManager().load());
        line.put("topics", plain(broker.getTopicConfigManager().getTopicConfigTable()));
        line.put("offsetsLoaded", broker.getConsumerOffsetManager().load());
        line.put("offsets", plain(broker.getConsumerOffsetManager().getOffsetTable()));
        line.put("groupsLoaded", broker.getSubscriptionGroupManager().load());
        line.put("groups", plain(broker.getSubscriptionGroupManager().getSubscriptionGroupTable()));
        // Not load(), which moves each offset into what its queue holds: asked is what the file says.
        line.put("levelsLoaded", broker.getScheduleMessageService().loadWhenSyncDelayOffset());
        line.put("levels", plain(broker.getScheduleMessageService().getOffsetTable()));
        Oracle.say(line);
    }

    private void write(BrokerController broker) {
        for (Map.Entry<String, Object> topic : command.getJSONObject("topics").entrySet()) {
            int queues = (Integer) topic.getValue();
            broker.getTopicConfigManager().updateTopicConfig(new TopicConfig(topic.getKey(), queues, queues));
        }
        for (Object group : command.getJSONArray("groups")) {
            SubscriptionGroupConfig config = new SubscriptionGroupConfig();
            config.setGroupName((String) group);
            broker.getSubscriptionGroupManager().updateSubscriptionGroupConfig(config);
        }
        for (Object row : command.getJSONArray("offsets")) {
            JSONObject offset = (JSONObject) row;
            broker.getConsumerOffsetManager().commitOffset(
                "oracle", offset.getString("group"), offset.getString("topic"),
                offset.getIntValue("queueId"), offset.getLongValue("offset"));
        }
        for (Map.Entry<String, Object> level : command.getJSONObject("levels").entrySet()) {
            broker.getScheduleMessageService().getOffsetTable().put(
                Integer.valueOf(level.getKey()), ((Number) level.getValue()).longValue());
        }
        broker.getTopicConfigManager().persist();
        broker.getConsumerOffsetManager().persist();
        broker.getSubscriptionGroupManager().persist();
        broker.getScheduleMessageService().persist();
    }

    /** A table with text keys: what is asked is what RocketMQ understood, not how it writes it. */
    private static Object plain(Map<?, ?> table) {
        Map<String, Object> plain = new TreeMap<>();
        table.forEach((key, value) -> plain.put(
            String.valueOf(key), value instanceof Map ? plain((Map<?, ?>) value) : value));
        return JSON.toJSON(plain);
    }
}
