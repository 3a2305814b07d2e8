import com.sun.management.OperatingSystemMXBean;
import java.io.File;
import java.lang.management.ManagementFactory;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Future;
import java.util.zip.CRC32;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.PutMessageStatus;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** RocketMQ's store doing what benchmarks/store.py measures; prints one line of JSON: seconds and CPU seconds. */
final class StoreBench {
    private static final InetSocketAddress HOST = new InetSocketAddress("127.0.0.1", 10911);
    private static final int IN_FLIGHT = 8;

    private final DefaultMessageStore store;
    private final Random random = new Random(1);

    private StoreBench(String dir, String flush, boolean warm) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(dir);
        config.setStorePathCommitLog(dir + "/commitlog");
        config.setFlushDiskType(FlushDiskType.valueOf(flush));
        config.setHaListenPort(0);
        config.setCleanFileForciblyEnable(false);
        config.setDiskSpaceWarningLevelRatio(100);
        config.setOsPageCacheBusyTimeOutMills(60_000);
        config.setWarmMapedFileEnable(warm);
        // Readers here are as close as they can be: give them whole batches.
        config.setMaxTransferCountOnMessageInMemory(10_000);
        config.setMaxTransferBytesOnMessageInMemory(1 << 20);
        config.setMaxTransferCountOnMessageInDisk(10_000);
        config.setMaxTransferBytesOnMessageInDisk(1 << 20);
        store = new DefaultMessageStore(
            config,
            new BrokerStatsManager("bench", false),
            (topic, queueId, offset, tagsCode, time, bitMap, properties) -> { },
            new BrokerConfig(),
            new ConcurrentHashMap<>());
    }

    public static void main(String[] words) {
        try {
            measure(words);
        } catch (Exception error) {
            error.printStackTrace();
            // Else the store's threads would keep the process.
            Runtime.getRuntime().halt(1);
        }
    }

    private static void measure(String[] words) throws Exception {
        // StoreBench WHAT DIR FLUSH COUNT BODY_BYTES ROWS
        String what = words[0];
        int count = Integer.parseInt(words[3]);
        int bodyBytes = Integer.parseInt(words[4]);
        int rows = Integer.parseInt(words[5]);
        boolean writes = what.equals("append") || what.equals("single");
        StoreBench bench = new StoreBench(words[1], words[2], writes);
        Watch watch = new Watch();
        if (!bench.store.load()) {
            throw new IllegalStateException("RocketMQ refuses " + words[1]);
        }
        double[] opened = watch.stop();
        if (what.equals("recover")) {
            print(opened);
            Runtime.getRuntime().halt(0);
        }
        bench.store.start();
        if (writes) {
            bench.awaitWarm();
        }
        switch (what) {
            case "append" -> {
                bench.append(count / 4, bodyBytes, rows);
                bench.awaitDispatch();
                watch = new Watch();
                bench.append(count, bodyBytes, rows);
                bench.awaitDispatch();
            }
            case "single" -> {
                bench.single(count / 4, bodyBytes);
                bench.awaitDispatch();
                watch = new Watch();
                bench.single(count, bodyBytes);
                bench.awaitDispatch();
            }
            case "read" -> {
                bench.awaitDispatch();
                bench.read(count / 4);
                watch = new Watch();
                bench.read(count);
            }
            case "query" -> {
                bench.awaitDispatch();
                bench.query(count / 4, rows);
                watch = new Watch();
                bench.query(count, rows);
            }
            default -> throw new IllegalArgumentException(what);
        }
        print(watch.stop());
        // Its orderly end takes seconds, and nobody opens this store again but in tests of crashes.
        Runtime.getRuntime().halt(0);
    }

    private static void print(double[] seconds) {
        System.out.printf("{\"seconds\": %.6f, \"cpu_seconds\": %.6f}%n", seconds[0], seconds[1]);
    }

    private void awaitDispatch() throws InterruptedException {
        while (store.dispatchBehindBytes() > 0) {
            Thread.sleep(1);
        }
    }

    /** Puts one message and waits until both files are warm: puts are refused meanwhile, and nobody is told when. */
    private void awaitWarm() throws Exception {
        PutMessageStatus status;
        do {
            status = store.asyncPutMessage(message(0, body(1))).get().getPutMessageStatus();
        } while (status == PutMessageStatus.CREATE_MAPPED_FILE_FAILED);
        int quiet = 0;
        while (quiet < 2) {
            Watch watch = new Watch();
            Thread.sleep(500);
            quiet = watch.stop()[1] < 0.05 ? quiet + 1 : 0;
        }
    }

    private byte[] body(int bytes) {
        byte[] body = new byte[bytes];
        random.nextBytes(body);
        return body;
    }

    /** Batches of `rows` messages with a key each, some on their way at a time. */
    private void append(int count, int bodyBytes, int rows) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (int row = 0; row < rows; row++) {
            Message message = new Message("t", body(bodyBytes));
            message.setKeys("k" + row);
            messages.add(message);
        }
        byte[] encoded = MessageDecoder.encodeMessages(messages);
        ArrayDeque<CompletableFuture<PutMessageResult>> waiting = new ArrayDeque<>();
        for (int done = 0; done < count; done += rows) {
            MessageExtBatch batch = new MessageExtBatch();
            batch.setTopic("t");
            batch.setQueueId(done / rows % 4);
            batch.setBody(encoded);
            batch.setBornTimestamp(System.currentTimeMillis());
            batch.setBornHost(HOST);
            batch.setStoreHost(HOST);
            waiting.add(store.asyncPutMessages(batch));
            if (waiting.size() == IN_FLIGHT) {
                check(waiting.remove());
            }
        }
        for (CompletableFuture<PutMessageResult> each : waiting) {
            check(each);
        }
    }

    /** Messages one by one; nobody waits for the one before. */
    private void single(int count, int bodyBytes) throws Exception {
        byte[] body = body(bodyBytes);
        CompletableFuture<PutMessageResult> last = null;
        for (int number = 0; number < count; number++) {
            last = store.asyncPutMessage(message(number % 4, body));
        }
        if (last != null) {
            check(last);
        }
    }

    private static MessageExtBrokerInner message(int queue, byte[] body) {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        message.setTopic("t");
        message.setQueueId(queue);
        message.setBody(body);
        message.setBornTimestamp(System.currentTimeMillis());
        message.setBornHost(HOST);
        message.setStoreHost(HOST);
        MessageAccessor.setProperties(message, new HashMap<>());
        message.setPropertiesString("");
        return message;
    }

    private static void check(Future<PutMessageResult> future) throws Exception {
        PutMessageResult result = future.get();
        if (!result.isOk()) {
            throw new IllegalStateException(String.valueOf(result.getPutMessageStatus()));
        }
    }

    /** Reads queue 0 to its end, `count` messages at most, and checksums every body byte. */
    private void read(int count) {
        CRC32 crc = new CRC32();
        long offset = store.getMinOffsetInQueue("t", 0);
        int done = 0;
        while (done < count) {
            GetMessageResult found = store.getMessage("g", "t", 0, offset, 10_000, 1 << 20, null);
            if (found.getMessageCount() == 0) {
                break;
            }
            for (SelectMappedBufferResult each : found.getMessageMapedList()) {
                ByteBuffer record = each.getByteBuffer();
                int length = record.getInt(84);
                crc.update(record.slice(88, length));
            }
            done += found.getMessageCount();
            offset = found.getNextBeginOffset();
            found.release();
        }
        if (done == 0 || crc.getValue() == 0) {
            throw new IllegalStateException("nothing was read");
        }
    }

    /** Looks for keys k0 to k(rows - 1) in turn. */
    private void query(int count, int rows) {
        for (int number = 0; number < count; number++) {
            String key = "k" + number * 7919L % rows;
            QueryMessageResult found = store.queryMessage("t", key, 32, 0, Long.MAX_VALUE);
            if (found.getMessageBufferList().isEmpty()) {
                throw new IllegalStateException("no message has key " + key);
            }
            found.release();
        }
    }

    /** Wall and CPU time of this process. */
    private static final class Watch {
        private final OperatingSystemMXBean system =
            (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        private final long begin = System.nanoTime();
        private final long cpuBegin = system.getProcessCpuTime();

        double[] stop() {
            return new double[] {
                (System.nanoTime() - begin) / 1e9, (system.getProcessCpuTime() - cpuBegin) / 1e9
            };
        }
    }
}
