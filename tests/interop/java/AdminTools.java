import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentSkipListMap;
import java.util.concurrent.TimeUnit;
import org.apache.commons.cli.CommandLine;
import org.apache.commons.cli.DefaultParser;
import org.apache.commons.cli.Options;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.AclUtils;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.srvutil.ServerUtil;
import org.apache.rocketmq.tools.command.MQAdminStartup;
import org.apache.rocketmq.tools.command.SubCommand;

/**
 * RocketMQ's own tools in one process, because the start of Java takes longer than a command.
 *
 * <p>Each line of the standard input is a JSON array of words. Each is answered with one line of JSON. "mqadmin"
 * runs commands, which are arrays. "consume" starts a push consumer of a topic and group, "received" says what all
 * have got. "dashboard" makes a call of RocketMQ Dashboard's backend.
 */
public final class AdminTools {
    private static final PrintStream OUT = System.out;
    private static final PrintStream ERR = System.err;
    private static final String HOME = System.getProperty(MixAll.ROCKETMQ_HOME_PROPERTY);
    private static final ThreadLocal<ByteArrayOutputStream> PRINTED = new ThreadLocal<>();

    private final String nameServer;
    private final DashboardCalls dashboard;
    private final List<DefaultMQPushConsumer> consumers = new ArrayList<>();
    /** Body -> how often it has come. */
    private final ConcurrentSkipListMap<String, Integer> received = new ConcurrentSkipListMap<>();

    private AdminTools(String nameServer) throws Exception {
        this.nameServer = nameServer;
        dashboard = new DashboardCalls(nameServer, hook());
    }

    public static void main(String[] args) throws Exception {
        AdminTools tools = new AdminTools(args[0]);
        PrintStream perThread = new PrintStream(new PerThread(), true, StandardCharsets.UTF_8);
        System.setOut(perThread);
        System.setErr(perThread);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String text = in.readLine(); text != null; text = in.readLine()) {
            JSONObject answer = new JSONObject(true);
            try {
                tools.obey(JSON.parseArray(text), answer);
            } catch (Throwable error) {
                error.printStackTrace(ERR);
                answer.put("failed", error.toString());
            }
            OUT.println(answer.toJSONString());
            OUT.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    private static AclClientRPCHook hook() {
        return new AclClientRPCHook(new SessionCredentials("raymq", System.getProperty("raymq.secret")));
    }

    @SuppressWarnings("deprecation")
    private void obey(JSONArray words, JSONObject answer) throws Exception {
        switch (words.getString(0)) {
            case "consume":
                consume(words.getString(1), words.getString(2), words.getString(3));
                break;
            case "received":
                // The first commit would come 10 s after the start.
                consumers.forEach(each -> each.getDefaultMQPushConsumerImpl().persistConsumerOffset());
                answer.put("found", received);
                break;
            case "dashboard":
                answer.put("found", dashboard.call(words.getString(1), words.subList(2, words.size())));
                break;
            case "mqadmin":
                List<String[]> commands = new ArrayList<>();
                for (Object each : words.subList(1, words.size())) {
                    commands.add(((JSONArray) each).toArray(new String[0]));
                }
                answer.put("found", runAll(commands));
                break;
            default:
                throw new IllegalArgumentException(words.toString());
        }
    }

    /**
     * Runs commands of mqadmin at the same time: the client of each may take 3 s to end. Each reads its credentials from
     * conf/tools.yml.
     */
    private JSONArray runAll(List<String[]> commands) throws Exception {
        List<CompletableFuture<JSONObject>> running = new ArrayList<>();
        for (String[] words : commands) {
            SubCommand command = command(words[0]);
            Set<Object> before = clients();
            CompletableFuture<JSONObject> next =
                CompletableFuture.supplyAsync(() -> run(command, words), task -> new Thread(task).start());
            running.add(next);
            // A command names its client by the time in ms, and fails if another one has the name: one after the other.
            while (before.containsAll(clients()) && !next.isDone()) {
                Thread.sleep(1);
            }
            Thread.sleep(2);
        }
        JSONArray answers = new JSONArray();
        for (CompletableFuture<JSONObject> each : running) {
            answers.add(each.get(30, TimeUnit.SECONDS));
        }
        return answers;
    }

    private static JSONObject run(SubCommand command, String[] words) {
        JSONObject answer = new JSONObject(true);
        try {
            PRINTED.set(new ByteArrayOutputStream());
            Options options = command.buildCommandlineOptions(ServerUtil.buildCommandlineOptions(new Options()));
            String[] rest = Arrays.copyOfRange(words, 1, words.length);
            CommandLine line = ServerUtil.parseCmdLine(command.commandName(), rest, options, new DefaultParser());
            command.execute(line, options, AclUtils.getAclRPCHook(HOME + MixAll.ACL_CONF_TOOLS_FILE));
        } catch (Throwable error) {
            error.printStackTrace();
        }
        answer.put("out", PRINTED.get().toString(StandardCharsets.UTF_8));
        return answer;
    }

    private static Object hidden(Class<?> type, String name, Object owner) throws Exception {
        Field field = type.getDeclaredField(name);
        field.setAccessible(true);
        return field.get(owner);
    }

    /** The names of the clients that run in this process. */
    private static Set<Object> clients() throws Exception {
        Object table = hidden(MQClientManager.class, "factoryTable", MQClientManager.getInstance());
        return new HashSet<>(((Map<?, ?>) table).keySet());
    }

    /** A new object of a command, because some serve once. */
    @SuppressWarnings("unchecked")
    private static SubCommand command(String name) throws Exception {
        List<SubCommand> commands = (List<SubCommand>) hidden(MQAdminStartup.class, "SUB_COMMANDS", null);
        commands.clear();
        MQAdminStartup.initCommand();
        for (SubCommand each : commands) {
            if (each.commandName().equals(name)) {
                return each;
            }
        }
        throw new IllegalArgumentException(name);
    }

    /** What a thread prints, its errors too, goes to its own text. */
    private static final class PerThread extends OutputStream {
        @Override
        public void write(int octet) {
            ByteArrayOutputStream own = PRINTED.get();
            if (own != null) {
                own.write(octet);
            }
        }
    }

    private void consume(String topic, String group, String instance) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, hook());
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(instance);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt each : messages) {
                received.merge(new String(each.getBody(), StandardCharsets.UTF_8), 1, Integer::sum);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        consumers.add(consumer);
    }
}
