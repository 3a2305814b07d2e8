import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/**
 * RocketMQ's Java client, unmodified, as `benchmarks.rocketmq` drives it against a broker and against RayMQ. It takes a
 * line "LOAD SECONDS" at a time on standard input, and answers with one of the figure's names and numbers.
 */
public class RemotingBench {
    private static final int THREADS = 64;
    private static final int BATCH_THREADS = 4;
    private static final int BATCH_ROWS = 32;
    private static final int ASYNC_WINDOW = 2_000;
    private static final int RATE = 2_000;

    private final DefaultMQProducer producer = new DefaultMQProducer("remoting-bench");
    private final String names;
    private final byte[] body = new byte[1024];
    private final AtomicLong backlog = new AtomicLong();

    private RemotingBench(String names) {
        this.names = names;
        for (int i = 0; i < body.length; i++) {
            body[i] = (byte) i;
        }
    }

    public static void main(String[] words) throws Exception {
        RemotingBench bench = new RemotingBench(words[0]);
        bench.producer.setNamesrvAddr(words[0]);
        bench.producer.setSendMsgTimeout(30_000);
        bench.producer.start();
        for (String topic : List.of("one", "backlog", "loop")) {
            bench.awaitTopic(topic);
        }
        System.out.println("ready");
        try (var input = new java.util.Scanner(System.in)) {
            while (input.hasNextLine()) {
                String[] asked = input.nextLine().split(" ");
                System.out.println(bench.load(asked[0], Double.parseDouble(asked[1])));
            }
        }
        System.exit(0);
    }

    private String load(String name, double seconds) throws Exception {
        return switch (name) {
            case "one" -> times("one", threads(1, seconds, this::sendOne));
            case "threads" -> rate("threads", threads(THREADS, seconds, this::sendOne), 1);
            case "batches" -> rate("batches", threads(BATCH_THREADS, seconds, this::sendBatch), BATCH_ROWS);
            case "async" -> async(seconds);
            case "read" -> read();
            case "loop" -> openLoop(seconds);
            default -> throw new IllegalArgumentException(name);
        };
    }

    /** A broker that has just started is not at the name server yet. */
    private void awaitTopic(String topic) throws Exception {
        for (int attempt = 0; ; attempt++) {
            try {
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

    private void sendOne() throws Exception {
        checked(producer.send(new Message("one", body)));
    }

    private void sendBatch() throws Exception {
        List<Message> batch = new ArrayList<>(BATCH_ROWS);
        for (int i = 0; i < BATCH_ROWS; i++) {
            batch.add(new Message("backlog", body));
        }
        checked(producer.send(batch));
        backlog.addAndGet(BATCH_ROWS);
    }

    private interface Send {
        void call() throws Exception;
    }

    /** The time of each send of all threads, in ns, ascending; the last one is the time of the whole. */
    private static long[] threads(int count, double seconds, Send send) throws Exception {
        List<long[]> all = new ArrayList<>();
        List<Exception> failures = new ArrayList<>();
        long begin = System.nanoTime();
        long end = begin + (long) (seconds * 1e9);
        Thread[] threads = new Thread[count];
        for (int i = 0; i < count; i++) {
            threads[i] = new Thread(() -> {
                long[] own = new long[1024];
                int sends = 0;
                try {
                    for (long now = System.nanoTime(); now < end; ) {
                        send.call();
                        long before = now;
                        now = System.nanoTime();
                        if (sends == own.length) {
                            own = Arrays.copyOf(own, 2 * sends);
                        }
                        own[sends++] = now - before;
                    }
                } catch (Exception error) {
                    synchronized (failures) {
                        failures.add(error);
                    }
                }
                synchronized (all) {
                    all.add(Arrays.copyOf(own, sends));
                }
            });
            threads[i].start();
        }
        for (Thread each : threads) {
            each.join();
        }
        if (!failures.isEmpty()) {
            throw failures.get(0);
        }
        long took = System.nanoTime() - begin;
        long[] sorted = all.stream().flatMapToLong(Arrays::stream).sorted().toArray();
        long[] found = Arrays.copyOf(sorted, sorted.length + 1);
        found[sorted.length] = took;
        return found;
    }

    private static String rate(String name, long[] times, int rows) {
        int count = times.length - 1;
        return name + "_msg_s " + rows * count * 1e9 / times[count] + " sends " + rows * count;
    }

    private static String times(String name, long[] times) {
        int count = times.length - 1;
        return name + "_p50_ms " + times[count / 2] / 1e6 + " " + name + "_p99_ms "
                + times[(int) (count * 0.99)] / 1e6;
    }

    /** Sends that do not wait, of which so many are under way at most. */
    private String async(double seconds) throws Exception {
        Semaphore window = new Semaphore(ASYNC_WINDOW);
        AtomicInteger sent = new AtomicInteger();
        AtomicInteger failed = new AtomicInteger();
        long begin = System.nanoTime();
        long end = begin + (long) (seconds * 1e9);
        while (System.nanoTime() < end) {
            window.acquire();
            producer.send(new Message("one", body), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    sent.incrementAndGet();
                    window.release();
                }

                @Override
                public void onException(Throwable error) {
                    failed.incrementAndGet();
                    window.release();
                }
            });
        }
        window.acquire(ASYNC_WINDOW);
        long took = System.nanoTime() - begin;
        if (failed.get() > 0) {
            throw new IllegalStateException(failed.get() + " sends failed");
        }
        return "async_msg_s " + sent.get() * 1e9 / took;
    }

    /** All messages of the backlog, by a push consumer with its default options. */
    private String read() throws Exception {
        long wanted = backlog.get();
        AtomicLong begin = new AtomicLong();
        AtomicLong got = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = consumer("backlog", message -> {
            begin.compareAndSet(0, System.nanoTime());
            if (got.incrementAndGet() == wanted) {
                done.countDown();
            }
        }, ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        done.await();
        double took = (System.nanoTime() - begin.get()) / 1e9;
        consumer.shutdown();
        return "read_msg_s " + wanted / took;
    }

    /** Messages that are due at a fixed rate, from then until their listener has them. */
    private String openLoop(double seconds) throws Exception {
        int count = (int) (RATE * seconds);
        long[] took = new long[count];
        CountDownLatch done = new CountDownLatch(count);
        String topic = "loop";
        long run = System.nanoTime();
        DefaultMQPushConsumer consumer = consumer(topic, message -> {
            ByteBuffer head = ByteBuffer.wrap(message);
            if (head.remaining() < 24 || head.getLong() != run) {
                return;
            }
            int number = (int) head.getLong();
            took[number] = System.nanoTime() - head.getLong();
            done.countDown();
        }, ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        // It has its queues and waits at their ends.
        Thread.sleep(3_000);
        AtomicInteger failed = new AtomicInteger();
        long begin = System.nanoTime();
        for (int i = 0; i < count; i++) {
            long due = begin + (long) (i * 1e9 / RATE);
            while (System.nanoTime() < due) {
                Thread.sleep(0, 200_000);
            }
            byte[] data = body.clone();
            ByteBuffer.wrap(data).putLong(run).putLong(i).putLong(due);
            producer.send(new Message(topic, data), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                }

                @Override
                public void onException(Throwable error) {
                    failed.incrementAndGet();
                }
            });
        }
        done.await();
        consumer.shutdown();
        if (failed.get() > 0) {
            throw new IllegalStateException(failed.get() + " sends failed");
        }
        Arrays.sort(took);
        return "loop_p50_ms " + took[count / 2] / 1e6 + " loop_p99_ms " + took[(int) (count * 0.99)] / 1e6;
    }

    private interface Listener {
        void take(byte[] body);
    }

    private DefaultMQPushConsumer consumer(String topic, Listener listener, ConsumeFromWhere from)
            throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench-" + System.nanoTime());
        consumer.setNamesrvAddr(names);
        consumer.setConsumeFromWhere(from);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (found, context) -> {
            found.forEach(each -> listener.take(each.getBody()));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }
}
