import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.filter.expression.MQFilterException;
import org.apache.rocketmq.filter.parser.SelectorParser;

/** Says which messages RocketMQ's SQL92 filters want, by the messages' properties. */
final class Filters {
    private final JSONObject command;

    Filters(JSONObject command) {
        this.command = command;
    }

    void run() {
        for (Object expression : command.getJSONArray("expressions")) {
            JSONObject line = Oracle.line("filter");
            line.put("expression", expression);
            line.put("wanted", wanted((String) expression));
            Oracle.say(line);
        }
    }

    /** Numbers of the messages; null: the expression is refused. */
    private JSONArray wanted(String text) {
        Expression expression;
        try {
            expression = SelectorParser.parse(text);
        } catch (MQFilterException error) {
            return null;
        }
        JSONArray wanted = new JSONArray();
        JSONArray rows = command.getJSONArray("rows");
        for (int row = 0; row < rows.size(); row++) {
            Map<String, Object> properties = new HashMap<>(rows.getJSONObject(row));
            if (isTrue(expression, properties)) {
                wanted.add(row);
            }
        }
        return wanted;
    }

    /** As ExpressionMessageFilter: what fails is not wanted. */
    private static boolean isTrue(Expression expression, Map<String, Object> properties) {
        try {
            return Boolean.TRUE.equals(expression.evaluate(new EvaluationContext() {
                @Override
                public Object get(String name) {
                    return properties.get(name);
                }

                @Override
                public Map<String, Object> keyValues() {
                    return properties;
                }
            }));
        } catch (Exception error) {
            return false;
        }
    }
}
