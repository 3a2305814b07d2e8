import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageId;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.queue.ConsumeQueueInterface;
import org.apache.rocketmq.store.queue.CqUnit;
import org.apache.rocketmq.store.queue.ReferredIterator;

/** Opens a copy of a store and says everything that RocketMQ reads of it. */
final class StoreReader {
    /** As many as RocketMQ looks for at once (maxMsgsNumBatch). */
    private static final int KEY_RESULTS = 64;
    private static final int BLANK = 0xCBD43194;

    private final JSONObject command;
    private DefaultMessageStore store;
    /** topic and key of every key that a record carries */
    private final Map<String, Set<String>> keys = new TreeMap<>();
    private long firstTime = Long.MAX_VALUE;
    private long lastTime;

    StoreReader(JSONObject command) {
        this.command = command;
    }

    void run() throws Exception {
        OpenStore open = new OpenStore(command);
        store = open.store;
        if (open.loaded) {
            open.start();
        }
        JSONObject load = Oracle.line("load");
        load.put("ok", open.loaded);
        load.put("crashed", open.crashed);
        load.put("min", open.loaded ? store.getMinPhyOffset() : -1);
        load.put("max", open.loaded ? store.getMaxPhyOffset() : -1);
        Oracle.say(load);
        if (!open.loaded) {
            return;
        }
        records();
        queues();
        keys();
        open.shutdownLater();
    }

    /** Every record of the log, also those that no consume queue has, by offset. */
    private void records() throws Exception {
        long at = Math.max(store.getMinPhyOffset(), 0);
        while (at < store.getMaxPhyOffset()) {
            SelectMappedBufferResult mapped = store.getCommitLogData(at);
            if (mapped == null) {
                throw new IllegalStateException("no data at " + at);
            }
            int size;
            int magic;
            byte[] raw = new byte[0];
            try {
                ByteBuffer buffer = mapped.getByteBuffer();
                size = buffer.getInt();
                magic = buffer.getInt();
                if (magic != BLANK) {
                    buffer.rewind();
                    raw = new byte[size];
                    buffer.get(raw);
                }
            } finally {
                mapped.release();
            }
            if (magic == BLANK) {
                at = store.getCommitLog().rollNextFile(at);
                continue;
            }
            record(store.lookMessageByOffset(at), at, magic, raw);
            at += size;
        }
    }

    private void record(MessageExt message, long at, int magic, byte[] raw) throws Exception {
        JSONObject line = Oracle.line("record");
        line.put("phy", at);
        line.put("field", message.getCommitLogOffset());
        line.put("size", message.getStoreSize());
        line.put("magic", Integer.toUnsignedLong(magic));
        line.put("topic", message.getTopic());
        line.put("queueId", message.getQueueId());
        line.put("queueOffset", message.getQueueOffset());
        line.put("flag", message.getFlag());
        line.put("sysFlag", message.getSysFlag());
        line.put("bodyCRC", message.getBodyCRC());
        line.put("born", message.getBornTimestamp());
        line.put("bornHost", host(message.getBornHost()));
        line.put("stored", message.getStoreTimestamp());
        line.put("storeHost", host(message.getStoreHost()));
        line.put("reconsume", message.getReconsumeTimes());
        line.put("prepared", message.getPreparedTransactionOffset());
        line.put("tags", message.getTags());
        line.put("keys", message.getKeys());
        line.put("bodyIsNull", message.getBody() == null);
        line.put("bodyLength", message.getBody() == null ? 0 : message.getBody().length);
        line.put("properties", new TreeMap<>(message.getProperties()));
        line.put("msgId", byId(message, at));
        line.put("sha256", sha256(raw));
        Oracle.say(line);
        firstTime = Math.min(firstTime, message.getStoreTimestamp());
        lastTime = Math.max(lastTime, message.getStoreTimestamp());
        Set<String> own = keys.computeIfAbsent(message.getTopic(), topic -> new TreeSet<>());
        String unique = message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX);
        if (unique != null) {
            own.add(unique);
        }
        if (message.getKeys() != null) {
            for (String key : message.getKeys().split(MessageConst.KEY_SEPARATOR)) {
                if (!key.isEmpty()) {
                    own.add(key);
                }
            }
        }
    }

    /** The message's id, checked: by it RocketMQ finds the same record again. */
    private String byId(MessageExt message, long at) throws Exception {
        String id = MessageDecoder.createMessageId(message.getStoreHost(), at);
        MessageId parsed = MessageDecoder.decodeMessageId(id);
        if (parsed.getOffset() != at || !parsed.getAddress().equals(message.getStoreHost())) {
            throw new IllegalStateException(id + " leads to " + parsed.getOffset() + ", not " + at);
        }
        return id;
    }

    private static String host(SocketAddress address) {
        InetSocketAddress host = (InetSocketAddress) address;
        String text = host.getAddress().getHostAddress();
        return (text.contains(":") ? "[" + text + "]" : text) + ":" + host.getPort();
    }

    /** Every queue: its limits, its units, and what getMessage gives for each. */
    private void queues() throws Exception {
        for (String topic : new TreeSet<>(store.getConsumeQueueTable().keySet())) {
            for (ConsumeQueueInterface queue : new TreeMap<>(store.getConsumeQueueTable().get(topic)).values()) {
                queue(topic, queue);
            }
        }
    }

    private void queue(String topic, ConsumeQueueInterface queue) throws Exception {
        int queueId = queue.getQueueId();
        long min = store.getMinOffsetInQueue(topic, queueId);
        long max = store.getMaxOffsetInQueue(topic, queueId);
        JSONObject limits = Oracle.line("queue");
        limits.put("topic", topic);
        limits.put("queueId", queueId);
        limits.put("min", min);
        limits.put("max", max);
        Oracle.say(limits);
        Map<Long, JSONObject> units = new TreeMap<>();
        long next = min;
        while (next < max) {
            ReferredIterator<CqUnit> found = queue.iterateFrom(next);
            if (found == null) {
                throw new IllegalStateException("no units of " + topic + " " + queueId + " at " + next);
            }
            try {
                while (found.hasNext()) {
                    CqUnit unit = found.next();
                    JSONObject line = Oracle.line("unit");
                    line.put("topic", topic);
                    line.put("queueId", queueId);
                    line.put("offset", unit.getQueueOffset());
                    line.put("position", unit.getPos());
                    line.put("size", unit.getSize());
                    line.put("tagsCode", unit.getTagsCode());
                    units.put(unit.getQueueOffset(), line);
                    next = unit.getQueueOffset() + 1;
                }
            } finally {
                found.release();
            }
        }
        Set<Long> times = new TreeSet<>();
        fetch(topic, queueId, min, max, units, times);
        units.values().forEach(Oracle::say);
        for (long time : times) {
            JSONObject line = Oracle.line("time");
            line.put("topic", topic);
            line.put("queueId", queueId);
            line.put("time", time);
            line.put("lower", store.getOffsetInQueueByTime(topic, queueId, time, BoundaryType.LOWER));
            line.put("upper", store.getOffsetInQueueByTime(topic, queueId, time, BoundaryType.UPPER));
            Oracle.say(line);
        }
    }

    /** getMessage from the first offset to the last; what came is written beside each unit. */
    private void fetch(
        String topic, int queueId, long min, long max, Map<Long, JSONObject> units, Set<Long> times
    ) throws Exception {
        long next = min;
        while (next < max) {
            GetMessageResult result = store.getMessage("oracle", topic, queueId, next, 32, null);
            try {
                if (result == null || result.getStatus() != GetMessageStatus.FOUND) {
                    throw new IllegalStateException(topic + " " + queueId + " at " + next + ": "
                        + (result == null ? "nothing" : result.getStatus()));
                }
                List<Long> offsets = result.getMessageQueueOffset();
                List<SelectMappedBufferResult> buffers = result.getMessageMapedList();
                for (int i = 0; i < offsets.size(); i++) {
                    ByteBuffer buffer = buffers.get(i).getByteBuffer();
                    byte[] raw = new byte[buffer.remaining()];
                    buffer.get(raw);
                    MessageExt message = MessageDecoder.decode(ByteBuffer.wrap(raw), true, false);
                    JSONObject line = units.get(offsets.get(i));
                    line.put("queueOffset", message.getQueueOffset());
                    line.put("msgId", message.getMsgId());
                    line.put("sha256", sha256(raw));
                    long stored = message.getStoreTimestamp();
                    times.add(stored - 1);
                    times.add(stored);
                    times.add(stored + 1);
                }
                if (result.getNextBeginOffset() <= next) {
                    throw new IllegalStateException("getMessage stays at " + next);
                }
                next = result.getNextBeginOffset();
            } finally {
                if (result != null) {
                    result.release();
                }
            }
        }
    }

    /** What the index finds for each key that stands in a record. */
    private void keys() throws Exception {
        for (Map.Entry<String, Set<String>> topic : keys.entrySet()) {
            for (String key : topic.getValue()) {
                JSONObject line = Oracle.line("key");
                line.put("topic", topic.getKey());
                line.put("key", key);
                line.put("found", query(topic.getKey(), key));
                Oracle.say(line);
            }
        }
    }

    private JSONArray query(String topic, String key) throws Exception {
        // A second more than there is: the index tells times in whole seconds.
        QueryMessageResult result =
            store.queryMessage(topic, key, KEY_RESULTS, firstTime - 1000, lastTime + 1000);
        List<Long> found = new ArrayList<>();
        try {
            for (ByteBuffer buffer : result.getMessageBufferList()) {
                found.add(MessageDecoder.decode(buffer.slice(), true, false).getCommitLogOffset());
            }
        } finally {
            result.release();
        }
        return new JSONArray(new ArrayList<>(new LinkedHashSet<>(found)));
    }

    private static String sha256(byte[] data) throws Exception {
        StringBuilder text = new StringBuilder();
        for (byte part : MessageDigest.getInstance("SHA-256").digest(data)) {
            text.append(String.format("%02x", part));
        }
        return text.toString();
    }
}
