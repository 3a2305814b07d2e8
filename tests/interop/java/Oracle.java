import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

/**
 * Apache RocketMQ's own store, asked and told in lines of JSON.
 *
 * <p>Each line of the standard input is one command; the answer is some lines and at last one of kind "done" or
 * "failed". One process serves many commands, since its start takes longer than most of them. A command with
 * "halt": true ends the process without a shutdown, as a crash would.
 */
public final class Oracle {
    private static final PrintStream OUT = new PrintStream(
        new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);

    private Oracle() {
    }

    /** Prints one line of an answer. */
    static void say(JSONObject line) {
        OUT.println(JSON.toJSONString(line, SerializerFeature.WriteMapNullValue));
    }

    /** A line of this kind, its fields in the order in which they are put. */
    static JSONObject line(String kind) {
        JSONObject line = new JSONObject(true);
        line.put("kind", kind);
        return line;
    }

    private static void obey(JSONObject command) throws Exception {
        switch (command.getString("do")) {
            case "read":
                new StoreReader(command).run();
                break;
            case "serve":
                new ServedStores(command).run();
                break;
            case "write":
                new StoreWriter(command).run();
                break;
            case "broker":
                new RealBroker(command).run();
                break;
            case "filter":
                new Filters(command).run();
                break;
            case "config":
                new ConfigFiles(command).run();
                break;
            case "remoting":
                new Remoting(command).run();
                break;
            default:
                throw new IllegalArgumentException("unknown command " + command);
        }
    }

    public static void main(String[] args) throws Exception {
        // What the libraries print must not come between the lines.
        System.setOut(System.err);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String text = in.readLine(); text != null; text = in.readLine()) {
            JSONObject command = JSON.parseObject(text);
            try {
                obey(command);
                say(line("done"));
            } catch (Throwable error) {
                error.printStackTrace();
                JSONObject failed = line("failed");
                failed.put("error", error.toString());
                say(failed);
            }
            OUT.flush();
            if (command.getBooleanValue("halt")) {
                Runtime.getRuntime().halt(0);
            }
        }
        // Stores that were only read are still open; nobody needs their shutdown.
        Runtime.getRuntime().halt(0);
    }
}
