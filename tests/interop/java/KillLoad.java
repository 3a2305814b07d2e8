import io.netty.channel.ChannelFuture;
import io.netty.channel.ChannelOption;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.netty.NettyRemotingClient;

/**
 * What the loads share under which servers are killed. Each line of standard output is a fact, the last one a JSON
 * object with what was found. Each line of standard input is an order: "cut" ends all connections, "stop" the load.
 */
final class KillLoad {
    static final int WAIT_MS = 60_000;
    private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    private static final BufferedReader IN =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

    private KillLoad() {
    }

    static RPCHook hook() {
        return new AclClientRPCHook(new SessionCredentials("raymq", System.getProperty("raymq.secret")));
    }

    static DefaultMQProducer producer(String nameServer) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("kill-producers", hook());
        producer.setNamesrvAddr(nameServer);
        // A retry of the client may store a message twice, also with RocketMQ.
        producer.setRetryTimesWhenSendFailed(0);
        producer.start();
        return producer;
    }

    /** A push consumer from the begin. Its offsets are stored often, so that more of these requests meet a kill. */
    static DefaultMQPushConsumer consumer(String nameServer, String topic, String group, String instance)
            throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, hook());
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(instance + "-" + ProcessHandle.current().pid());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPersistConsumerOffsetInterval(500);
        consumer.subscribe(topic, "*");
        return consumer;
    }

    static synchronized void say(String kind, String text) {
        OUT.println(kind + " " + text);
    }

    static void end(Map<String, Object> found) {
        OUT.println(ClientScenarios.json(found));
        Runtime.getRuntime().halt(0);
    }

    /** Obeys orders until one is "stop", or the input ends. */
    static void awaitStop() throws Exception {
        for (String order = IN.readLine(); order != null && !order.equals("stop"); order = IN.readLine()) {
            if (order.equals("cut")) {
                cut();
            }
        }
    }

    /** Waits a little, so that a load whose server is away does not only count errors. */
    static void rest() {
        try {
            Thread.sleep(5);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    interface Condition {
        boolean holds() throws Exception;
    }

    static boolean until(Condition condition) throws Exception {
        long end = System.currentTimeMillis() + WAIT_MS;
        while (!condition.holds()) {
            if (System.currentTimeMillis() > end) {
                return false;
            }
            Thread.sleep(20);
        }
        return true;
    }

    /** Ends each connection of this process by a reset, as a network does that loses it. */
    private static void cut() throws Exception {
        Object clients = hidden(MQClientManager.class, "factoryTable", MQClientManager.getInstance());
        for (Object client : ((Map<?, ?>) clients).values()) {
            Object remoting = ((MQClientInstance) client).getMQClientAPIImpl().getRemotingClient();
            Object channels = hidden(NettyRemotingClient.class, "channelTables", remoting);
            for (Object each : ((Map<?, ?>) channels).values()) {
                ChannelFuture future = (ChannelFuture) hidden(each.getClass(), "channelFuture", each);
                future.channel().config().setOption(ChannelOption.SO_LINGER, 0);
                future.channel().close();
            }
        }
    }

    private static Object hidden(Class<?> type, String name, Object owner) throws Exception {
        Field field = type.getDeclaredField(name);
        field.setAccessible(true);
        return field.get(owner);
    }
}
