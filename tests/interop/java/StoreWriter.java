import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.io.File;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.AppendMessageResult;
import org.apache.rocketmq.store.PutMessageResult;

/**
 * Puts the command's "messages" into a store, new or not, and says what RocketMQ answered to each.
 *
 * <p>A message is what a broker would hand to its store; one with "batch" is a batch of such bodies; one with "action" is
 * for the broker's services. With "halt" the process ends then, with "leave" the store stays as it is for a while; else it
 * is shut down in order.
 */
final class StoreWriter {
    private final JSONObject command;

    StoreWriter(JSONObject command) {
        this.command = command;
    }

    void run() throws Exception {
        OpenStore open = new OpenStore(command);
        if (!open.loaded) {
            throw new IllegalStateException("RocketMQ refuses " + command.getString("dir"));
        }
        open.start();
        BrokerServices services = new BrokerServices(open);
        for (Object given : command.getJSONArray("messages")) {
            JSONObject message = (JSONObject) given;
            Oracle.say(message.containsKey("action") ? services.act(message) : put(open, message));
        }
        if (!command.getBooleanValue("undispatched")) {
            open.awaitDispatch();
        }
        if (command.getBooleanValue("leave")) {
            open.shutdownLater();
        } else if (!command.getBooleanValue("halt")) {
            open.shutdown();
            if (new File(command.getString("dir"), "abort").exists()) {
                throw new IllegalStateException("the shutdown was no clean one");
            }
        }
    }

    private JSONObject put(OpenStore open, JSONObject given) throws Exception {
        PutMessageResult result;
        if (given.containsKey("batch")) {
            result = open.store.putMessages(batch(given));
        } else {
            result = open.store.putMessage(message(given));
        }
        return answer(result);
    }

    static JSONObject answer(PutMessageResult result) {
        JSONObject line = Oracle.line("put");
        line.put("status", result.getPutMessageStatus().name());
        AppendMessageResult appended = result.getAppendMessageResult();
        if (appended != null) {
            line.put("phy", appended.getWroteOffset());
            line.put("queueOffset", appended.getLogicsOffset());
            line.put("stored", appended.getStoreTimestamp());
            line.put("msgId", appended.getMsgId());
            line.put("count", appended.getMsgNum());
        }
        return line;
    }

    /** One message, as a broker makes it of a request. */
    static MessageExtBrokerInner message(JSONObject given) throws Exception {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        fill(message, given);
        message.setBody(Base64.getDecoder().decode(given.getString("body")));
        properties(message, given.getJSONObject("properties"));
        if (given.containsKey("dueInMs")) {
            long due = System.currentTimeMillis() + given.getLongValue("dueInMs");
            MessageAccessor.putProperty(message, "TIMER_DELIVER_MS", Long.toString(due));
        }
        message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
        return message;
    }

    private static MessageExtBatch batch(JSONObject given) throws Exception {
        MessageExtBatch batch = new MessageExtBatch();
        fill(batch, given);
        JSONArray bodies = given.getJSONArray("batch");
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < bodies.size(); i++) {
            Message message = new Message(
                given.getString("topic"), Base64.getDecoder().decode(bodies.getString(i)));
            message.setFlag(given.getIntValue("flag"));
            properties(message, given.getJSONObject("properties"));
            messages.add(message);
        }
        if (given.containsKey("batchProperties")) {
            properties(batch, given.getJSONObject("batchProperties"));
        }
        batch.setBody(MessageDecoder.encodeMessages(messages));
        return batch;
    }

    private static void fill(MessageExtBrokerInner message, JSONObject given) throws Exception {
        // A broker's message has them, if none.
        MessageAccessor.setProperties(message, new HashMap<>());
        message.setTopic(given.getString("topic"));
        message.setQueueId(given.getIntValue("queueId"));
        message.setFlag(given.getIntValue("flag"));
        message.setSysFlag(given.getIntValue("sysFlag"));
        message.setBornTimestamp(given.getLongValue("born"));
        message.setBornHost(host(given, "bornHost"));
        message.setStoreHost(host(given, "storeHost"));
        message.setReconsumeTimes(given.getIntValue("reconsume"));
        message.setPreparedTransactionOffset(given.getLongValue("prepared"));
    }

    private static void properties(Message message, JSONObject given) {
        for (Map.Entry<String, Object> property : given.entrySet()) {
            MessageAccessor.putProperty(message, property.getKey(), (String) property.getValue());
        }
    }

    private static SocketAddress host(JSONObject given, String name) throws Exception {
        JSONArray host = given.getJSONArray(name);
        return new InetSocketAddress(InetAddress.getByName(host.getString(0)), host.getIntValue(1));
    }
}
