import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.lang.reflect.Field;
import java.lang.reflect.Modifier;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.acl.common.AclUtils;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.compression.CompressorFactory;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.remoting.protocol.LanguageCode;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.remoting.protocol.RequestCode;
import org.apache.rocketmq.remoting.protocol.ResponseCode;
import org.apache.rocketmq.remoting.protocol.SerializeType;
import org.apache.rocketmq.remoting.protocol.admin.TopicStatsTable;
import org.apache.rocketmq.remoting.protocol.body.ResetOffsetBody;
import org.apache.rocketmq.remoting.protocol.route.TopicRouteData;

/** Frames, bodies, signatures and codes of RocketMQ's remoting protocol, by RocketMQ's own classes. */
final class Remoting {
    /** What a name server writes for clients from 4.9.4 on. */
    private static final SerializerFeature[] STANDARD = {
        SerializerFeature.BrowserCompatible,
        SerializerFeature.QuoteFieldNames,
        SerializerFeature.SkipTransientField,
        SerializerFeature.MapSortField,
    };

    private final JSONObject command;

    Remoting(JSONObject command) {
        this.command = command;
    }

    void run() throws Exception {
        switch (command.getString("what")) {
            case "codes":
                codes();
                break;
            case "decode":
                for (Object frame : command.getJSONArray("frames")) {
                    decode(bytes((String) frame));
                }
                break;
            case "encode":
                for (JSONObject each : objects("commands")) {
                    encode(each);
                }
                break;
            case "bodies":
                for (JSONObject each : objects("bodies")) {
                    body(each.getString("type"), bytes(each.getString("body")));
                }
                break;
            case "texts":
                for (Object text : command.getJSONArray("texts")) {
                    JSONObject line = Oracle.line("text");
                    line.put("dialect", text(utf8(JSON.toJSONString(text))));
                    line.put("standard", text(utf8(JSON.toJSONString(text, STANDARD))));
                    Oracle.say(line);
                }
                break;
            case "batch":
                batch();
                break;
            case "compress":
                compress(bytes(command.getString("body")));
                break;
            case "properties":
                for (Object each : command.getJSONArray("texts")) {
                    JSONObject line = Oracle.line("properties");
                    line.put("found", MessageDecoder.string2messageProperties((String) each));
                    Oracle.say(line);
                }
                break;
            default:
                throw new IllegalArgumentException("unknown " + command);
        }
    }

    private List<JSONObject> objects(String name) {
        JSONArray array = command.getJSONArray(name);
        List<JSONObject> objects = new ArrayList<>();
        for (int at = 0; at < array.size(); at++) {
            objects.add(array.getJSONObject(at));
        }
        return objects;
    }

    private static byte[] bytes(String base64) {
        return Base64.getDecoder().decode(base64);
    }

    private static String text(byte[] bytes) {
        return bytes == null ? "" : Base64.getEncoder().encodeToString(bytes);
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    private static void codes() throws IllegalAccessException {
        JSONObject line = Oracle.line("codes");
        line.put("RequestCode", constants(RequestCode.class));
        line.put("ResponseCode", constants(ResponseCode.class));
        Map<String, Integer> languages = new HashMap<>();
        for (LanguageCode language : LanguageCode.values()) {
            languages.put(language.name(), (int) language.getCode());
        }
        line.put("Language", languages);
        Map<String, Integer> versions = new HashMap<>();
        for (MQVersion.Version version : MQVersion.Version.values()) {
            versions.put(version.name(), version.ordinal());
        }
        line.put("MQVersion", versions);
        Oracle.say(line);
    }

    /** The numbers of a class and of those that it extends. */
    private static Map<String, Integer> constants(Class<?> type) throws IllegalAccessException {
        Map<String, Integer> found = new HashMap<>();
        for (Field field : type.getFields()) {
            if (Modifier.isStatic(field.getModifiers()) && field.getType() == int.class) {
                found.put(field.getName(), field.getInt(null));
            }
        }
        return found;
    }

    /** Says what a frame holds, as it comes from the decoder that cuts its length off. */
    private static void decode(byte[] frame) throws Exception {
        ByteBuffer buffer = ByteBuffer.wrap(frame);
        if (buffer.getInt() != frame.length - 4) {
            throw new IllegalArgumentException("the length of the frame");
        }
        RemotingCommand found = RemotingCommand.decode(buffer.slice());
        JSONObject line = Oracle.line("command");
        line.put("code", found.getCode());
        line.put("opaque", found.getOpaque());
        line.put("flag", found.getFlag());
        line.put("version", found.getVersion());
        line.put("language", found.getLanguage().name());
        line.put("remark", found.getRemark());
        line.put("fields", found.getExtFields());
        line.put("body", text(found.getBody()));
        line.put("type", found.getSerializeTypeCurrentRPC() == SerializeType.JSON ? "json" : "binary");
        line.put("response", found.isResponseType());
        line.put("oneWay", found.isOnewayRPC());
        Oracle.say(line);
    }

    /** Says the frame of a command, and its signature. */
    private static void encode(JSONObject wanted) {
        RemotingCommand made = RemotingCommand.createRequestCommand(wanted.getIntValue("code"), null);
        made.setOpaque(wanted.getIntValue("opaque"));
        made.setFlag(wanted.getIntValue("flag"));
        made.setVersion(wanted.getIntValue("version"));
        made.setLanguage(LanguageCode.valueOf(wanted.getString("language")));
        made.setRemark(wanted.getString("remark"));
        made.setBody(bytes(wanted.getString("body")));
        boolean isJson = wanted.getString("type").equals("json");
        made.setSerializeTypeCurrentRPC(isJson ? SerializeType.JSON : SerializeType.ROCKETMQ);
        HashMap<String, String> fields = new HashMap<>();
        wanted.getJSONObject("fields").forEach((name, value) -> fields.put(name, (String) value));
        made.setExtFields(fields);

        JSONObject line = Oracle.line("frame");
        line.put("frame", text(made.encode().array()));
        byte[] signed = AclUtils.combineRequestContent(made, new TreeMap<>(fields));
        line.put("signature", AclUtils.calSignature(signed, wanted.getString("secret")));
        Oracle.say(line);
    }

    /** Reads a body as clients do, and says it in both dialects. */
    private static void body(String type, byte[] body) {
        Class<? extends RemotingSerializable> kind;
        switch (type) {
            case "TopicRouteData":
                kind = TopicRouteData.class;
                break;
            case "TopicStatsTable":
                kind = TopicStatsTable.class;
                break;
            case "ResetOffsetBody":
                kind = ResetOffsetBody.class;
                break;
            default:
                throw new IllegalArgumentException("unknown type " + type);
        }
        RemotingSerializable found = RemotingSerializable.decode(body, kind);
        JSONObject line = Oracle.line("body");
        line.put("dialect", text(found.encode()));
        line.put("standard", text(found.encode(STANDARD)));
        Oracle.say(line);
    }

    /** Reads a batch and says its messages, and the batch that a client makes of them. */
    private void batch() throws Exception {
        List<Message> messages =
            MessageDecoder.decodeMessages(ByteBuffer.wrap(bytes(command.getString("body"))));
        for (Message message : messages) {
            JSONObject line = Oracle.line("message");
            line.put("flag", message.getFlag());
            line.put("body", text(message.getBody()));
            line.put("properties", message.getProperties());
            Oracle.say(line);
            // In one order, whatever that of the map is.
            MessageAccessor.setProperties(message, new TreeMap<>(message.getProperties()));
        }
        JSONObject line = Oracle.line("batch");
        line.put("body", text(MessageDecoder.encodeMessages(messages)));
        Oracle.say(line);
    }

    /** Says a body as each codec of clients compresses it, and what is added to its sysFlag. */
    private static void compress(byte[] body) throws Exception {
        for (CompressionType type : Arrays.asList(CompressionType.values())) {
            JSONObject line = Oracle.line("compressed");
            line.put("type", type.name());
            line.put("flag", type.getCompressionFlag());
            line.put("body", text(CompressorFactory.getCompressor(type).compress(body, 5)));
            Oracle.say(line);
        }
    }
}
