import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;

/**
 * A push consumer of RocketMQ in POP mode, as `benchmarks.workers` has it beside workers. Each message is acknowledged by
 * itself. It prints the messages a second from the first one to the last one.
 *
 * <p>Arguments: name server, messages, threads, bytes of a body.
 */
public class PopBench {
    private static final String TOPIC = "pop";
    private static final String GROUP = "pop-workers";
    private static final int BATCH_ROWS = 32;
    private static final int INVISIBLE_MS = 60_000;

    public static void main(String[] words) throws Exception {
        int count = Integer.parseInt(words[1]);
        DefaultMQProducer producer = new DefaultMQProducer("pop-bench");
        producer.setNamesrvAddr(words[0]);
        producer.setSendMsgTimeout(30_000);
        producer.start();
        fill(producer, count, "x".repeat(Integer.parseInt(words[3])).getBytes(StandardCharsets.UTF_8));
        setMode(producer);

        AtomicLong began = new AtomicLong();
        AtomicLong done = new AtomicLong();
        CountDownLatch all = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(GROUP);
        consumer.setNamesrvAddr(words[0]);
        // The broker says which queues it pops, and in which mode.
        consumer.setClientRebalance(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(Integer.parseInt(words[2]));
        consumer.setConsumeThreadMax(Integer.parseInt(words[2]));
        consumer.setPopBatchNums(BATCH_ROWS);
        consumer.setPopInvisibleTime(INVISIBLE_MS);
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.subscribe(TOPIC, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            began.compareAndSet(0, System.nanoTime());
            for (MessageExt message : messages) {
                if (message.getProperty("POP_CK") == null) {
                    throw new IllegalStateException("the message was not popped");
                }
            }
            if (done.addAndGet(messages.size()) >= count) {
                all.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        if (!all.await(120, TimeUnit.SECONDS)) {
            throw new IllegalStateException(done.get() + " messages of " + count);
        }
        System.out.println(count / ((System.nanoTime() - began.get()) / 1e9));
        System.exit(0);
    }

    private static void fill(DefaultMQProducer producer, int count, byte[] body) throws Exception {
        for (int sent = 0; sent < count; ) {
            List<Message> batch = new ArrayList<>(BATCH_ROWS);
            while (batch.size() < BATCH_ROWS && sent + batch.size() < count) {
                batch.add(new Message(TOPIC, body));
            }
            try {
                if (producer.send(batch).getSendStatus() != SendStatus.SEND_OK) {
                    throw new IllegalStateException("a batch was not stored");
                }
                sent += batch.size();
            } catch (Exception error) {
                if (sent > 0) {
                    throw error;
                }
                // A broker that has just started is not at the name server yet.
                Thread.sleep(500);
            }
        }
    }

    /** As `mqadmin setConsumeMode`. */
    private static void setMode(DefaultMQProducer producer) throws Exception {
        MQClientInstance client = producer.getDefaultMQProducerImpl().getMqClientFactory();
        String broker = producer.fetchPublishMessageQueues(TOPIC).get(0).getBrokerName();
        String address = client.findBrokerAddressInPublish(broker);
        client.getMQClientAPIImpl()
                .setMessageRequestMode(address, TOPIC, GROUP, MessageRequestMode.POP, 0, 5_000);
    }
}
