import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.hook.ConsumeMessageContext;
import org.apache.rocketmq.client.hook.ConsumeMessageHook;
import org.apache.rocketmq.client.hook.SendMessageContext;
import org.apache.rocketmq.client.hook.SendMessageHook;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/** A producer and a consumer with hooks, that trace their messages. Prints what the hooks have seen. */
public class TracedScenario {
    public static void main(String[] args) {
        int code = 1;
        try {
            System.out.println(ClientScenarios.json(run(args[0], args[1], Integer.parseInt(args[2]))));
            code = 0;
        } catch (Throwable error) {
            error.printStackTrace();
        }
        System.exit(code);
    }

    // There is no other way to register a hook.
    @SuppressWarnings("deprecation")
    private static Map<String, Object> run(String nameServer, String topic, int count) throws Exception {
        Map<String, Object> found = new TreeMap<>();
        AtomicInteger before = new AtomicInteger();
        AtomicInteger after = new AtomicInteger();
        TreeSet<String> sends = new TreeSet<>();
        DefaultMQProducer producer =
                new DefaultMQProducer("traced-producers", ClientScenarios.hook(), true, null);
        producer.setNamesrvAddr(nameServer);
        producer.getDefaultMQProducerImpl().registerSendMessageHook(new SendMessageHook() {
            @Override
            public String hookName() {
                return "sends";
            }

            @Override
            public void sendMessageBefore(SendMessageContext context) {
                before.incrementAndGet();
            }

            @Override
            public void sendMessageAfter(SendMessageContext context) {
                after.incrementAndGet();
                synchronized (sends) {
                    sends.add(context.getSendResult().getSendStatus() + " " + context.getMq().getBrokerName() + " "
                            + context.getSendResult().getRegionId() + " " + context.getSendResult().isTraceOn());
                }
            }
        });
        producer.start();

        AtomicInteger consumed = new AtomicInteger();
        TreeSet<String> results = new TreeSet<>();
        CountDownLatch all = new CountDownLatch(count);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("traced-consumers", ClientScenarios.hook(),
                new AllocateMessageQueueAveragely(), true, null);
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(each -> all.countDown());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.getDefaultMQPushConsumerImpl().registerConsumeMessageHook(new ConsumeMessageHook() {
            @Override
            public String hookName() {
                return "consumption";
            }

            @Override
            public void consumeMessageBefore(ConsumeMessageContext context) {
            }

            @Override
            public void consumeMessageAfter(ConsumeMessageContext context) {
                consumed.addAndGet(context.getMsgList().size());
                synchronized (results) {
                    results.add(context.getStatus() + " " + context.isSuccess());
                }
            }
        });
        consumer.start();

        for (int i = 0; i < count; i++) {
            producer.send(new Message(topic, "TagA", "key-" + i, ("body " + i).getBytes(StandardCharsets.UTF_8)));
        }
        found.put("all", all.await(ClientScenarios.WAIT_S, TimeUnit.SECONDS));
        Thread.sleep(500);
        // What is left of the traces is sent at the end.
        consumer.shutdown();
        producer.shutdown();
        found.put("before", before.get());
        found.put("after", after.get());
        found.put("sends", String.join(", ", sends));
        found.put("consumed", consumed.get());
        found.put("results", String.join(", ", results));
        return found;
    }
}
