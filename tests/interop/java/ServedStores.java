import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.List;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.queue.ConsumeQueueInterface;

/**
 * Opens many stores, which may be damaged, and says what a consumer of each queue gets.
 *
 * <p>A store stays open until the next command, so that its directory can be copied as a crash would leave it.
 */
final class ServedStores {
    private static final int MESSAGES = 32;
    private static final List<OpenStore> OPEN = new ArrayList<>();

    private final JSONObject command;

    ServedStores(JSONObject command) {
        this.command = command;
    }

    void run() {
        for (OpenStore open : OPEN) {
            Thread thread = new Thread(open::shutdown, "shutdown");
            thread.setDaemon(true);
            thread.start();
        }
        OPEN.clear();
        for (Object dir : command.getJSONArray("dirs")) {
            JSONObject one = new JSONObject(command);
            one.put("dir", dir);
            JSONObject line = Oracle.line("served");
            line.put("dir", dir);
            try {
                serve(one, line);
            } catch (Throwable error) {
                error.printStackTrace();
                line.put("ok", false);
                line.put("error", error.toString());
            }
            Oracle.say(line);
        }
    }

    private void serve(JSONObject one, JSONObject line) throws Exception {
        OpenStore open = new OpenStore(one);
        line.put("ok", open.loaded);
        if (!open.loaded) {
            return;
        }
        OPEN.add(open);
        open.start();
        DefaultMessageStore store = open.store;
        JSONArray queues = new JSONArray();
        for (String topic : new TreeSet<>(store.getConsumeQueueTable().keySet())) {
            for (ConsumeQueueInterface queue : new TreeMap<>(store.getConsumeQueueTable().get(topic)).values()) {
                queues.add(queue(store, topic, queue.getQueueId()));
            }
        }
        line.put("queues", queues);
    }

    private static JSONObject queue(DefaultMessageStore store, String topic, int queueId) throws Exception {
        JSONObject line = new JSONObject(true);
        long min = store.getMinOffsetInQueue(topic, queueId);
        long max = store.getMaxOffsetInQueue(topic, queueId);
        line.put("topic", topic);
        line.put("queueId", queueId);
        line.put("min", min);
        line.put("max", max);
        JSONArray messages = new JSONArray();
        long next = min;
        // A damaged unit may say any offset.
        while (next < max && messages.size() < 100_000) {
            GetMessageResult result = store.getMessage("oracle", topic, queueId, next, MESSAGES, null);
            if (result == null) {
                break;
            }
            try {
                List<SelectMappedBufferResult> buffers = result.getMessageMapedList();
                for (int i = 0; i < buffers.size(); i++) {
                    JSONArray message = new JSONArray();
                    message.add(result.getMessageQueueOffset().get(i));
                    message.add(digest(buffers.get(i).getByteBuffer()));
                    messages.add(message);
                }
                if (result.getNextBeginOffset() <= next) {
                    break;
                }
                next = result.getNextBeginOffset();
            } finally {
                result.release();
            }
        }
        line.put("messages", messages);
        return line;
    }

    /** The hash of a record's bytes; null for bytes that no client can decode. */
    private static String digest(ByteBuffer buffer) throws Exception {
        byte[] raw = new byte[buffer.remaining()];
        buffer.get(raw);
        MessageExt message = MessageDecoder.decode(ByteBuffer.wrap(raw), true, false);
        if (message == null || message.getStoreSize() != raw.length) {
            return null;
        }
        StringBuilder text = new StringBuilder();
        for (byte part : MessageDigest.getInstance("SHA-256").digest(raw)) {
            text.append(String.format("%02x", part));
        }
        return text.toString();
    }
}
