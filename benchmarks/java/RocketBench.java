import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/** The loads of benchmarks/compare.py by RocketMQ's own client; prints a line "figure value" for each. */
final class RocketBench {
    /** Threads that send batches, each a batch at a time: with one, the broker would wait for the client. */
    private static final int BATCH_THREADS = 4;

    private final DefaultMQProducer producer = new DefaultMQProducer("bench");
    private final String names;
    private final String one;
    private final String backlog;
    private final byte[] body;
    private final int batchRows;

    private RocketBench(String names, String one, String backlog, int size, int batchRows) {
        this.names = names;
        this.one = one;
        this.backlog = backlog;
        this.body = new byte[size];
        this.batchRows = batchRows;
        for (int i = 0; i < size; i++) {
            body[i] = (byte) i;
        }
    }

    public static void main(String[] words) throws Exception {
        int size = Integer.parseInt(words[3]);
        int waiting = Integer.parseInt(words[4]);
        int batchRows = Integer.parseInt(words[5]);
        double seconds = Double.parseDouble(words[6]);
        double warmUp = Double.parseDouble(words[7]);
        long readMost = Long.parseLong(words[8]);

        RocketBench bench = new RocketBench(words[0], words[1], words[2], size, batchRows);
        bench.producer.setNamesrvAddr(words[0]);
        bench.producer.setMaxMessageSize(4 << 20);
        bench.producer.setSendMsgTimeout(30_000);
        bench.producer.start();
        for (String topic : List.of(words[1], words[2])) {
            bench.createTopic(topic);
        }

        bench.single(waiting, warmUp / 2);
        long stored = bench.batches(warmUp / 2)[0];
        double[] found = bench.single(1, seconds);
        System.out.println("one_msg_s " + found[0] + "\none_p50_ms " + found[1]);
        System.out.println("threads_msg_s " + bench.single(waiting, seconds)[0]);

        long[] sent = bench.batches(seconds);
        System.out.println("produce_msg_s " + sent[0] * 1e9 / sent[1]);
        System.out.println("read_msg_s " + bench.read(Math.min(stored + sent[0], readMost)));
        System.out.flush();
        System.exit(0);
    }

    /** A topic of one queue. A broker that has just started is not at the name server yet. */
    private void createTopic(String topic) throws Exception {
        for (int attempt = 0; ; attempt++) {
            try {
                producer.createTopic("TBW102", topic, 1, Map.of());
                checked(producer.send(new Message(topic, body)));
                return;
            } catch (Exception error) {
                if (attempt == 60) {
                    throw error;
                }
                Thread.sleep(500);
            }
        }
    }

    private static void checked(SendResult result) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException(result.toString());
        }
    }

    private interface Send {
        /** Returns how many messages are acknowledged. */
        int call() throws Exception;
    }

    /** Threads that send until the time is up; returns {messages, nanoseconds}, and the time of each send. */
    private static long[] run(int threads, double seconds, List<long[]> times, Send send)
            throws Exception {
        AtomicLong sent = new AtomicLong();
        AtomicReference<Exception> failure = new AtomicReference<>();
        List<Thread> all = new ArrayList<>();
        long begin = System.nanoTime();
        long end = begin + (long) (seconds * 1e9);
        for (int i = 0; i < threads; i++) {
            Thread thread = new Thread(() -> {
                long[] own = new long[1024];
                int count = 0;
                try {
                    for (long now = System.nanoTime(); now < end; ) {
                        sent.addAndGet(send.call());
                        long before = now;
                        now = System.nanoTime();
                        if (count == own.length) {
                            own = Arrays.copyOf(own, 2 * count);
                        }
                        own[count++] = now - before;
                    }
                } catch (Exception error) {
                    failure.set(error);
                }
                synchronized (times) {
                    times.add(Arrays.copyOf(own, count));
                }
            });
            thread.start();
            all.add(thread);
        }
        for (Thread thread : all) {
            thread.join();
        }
        if (failure.get() != null) {
            throw failure.get();
        }
        return new long[] {sent.get(), System.nanoTime() - begin};
    }

    /** Threads that each wait for a message's acknowledgement; returns {messages a second, p50 ms}. */
    private double[] single(int threads, double seconds) throws Exception {
        List<long[]> times = new ArrayList<>();
        long[] found = run(threads, seconds, times, () -> {
            checked(producer.send(new Message(one, body)));
            return 1;
        });
        long[] sorted = times.stream().flatMapToLong(Arrays::stream).sorted().toArray();
        return new double[] {found[0] * 1e9 / found[1], sorted[sorted.length / 2] / 1e6};
    }

    /** Batches of the client's own kind, a list of messages; returns {messages, nanoseconds}. */
    private long[] batches(double seconds) throws Exception {
        return run(BATCH_THREADS, seconds, new ArrayList<>(), () -> {
            List<Message> batch = new ArrayList<>(batchRows);
            for (int i = 0; i < batchRows; i++) {
                batch.add(new Message(backlog, body));
            }
            checked(producer.send(batch));
            return batchRows;
        });
    }

    /** Messages a second, from the first answer on. */
    private double read(long messages) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench-" + System.nanoTime());
        consumer.setNamesrvAddr(names);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(batchRows);
        consumer.setConsumeMessageBatchMaxSize(batchRows);
        consumer.subscribe(backlog, "*");

        AtomicLong begin = new AtomicLong();
        AtomicLong first = new AtomicLong();
        AtomicLong got = new AtomicLong();
        AtomicLong end = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (found, context) -> {
            if (begin.compareAndSet(0, System.nanoTime())) {
                first.set(found.size());
            }
            if (got.addAndGet(found.size()) >= messages && end.compareAndSet(0, System.nanoTime())) {
                done.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        done.await();
        consumer.shutdown();
        return (messages - first.get()) * 1e9 / (end.get() - begin.get());
    }
}
