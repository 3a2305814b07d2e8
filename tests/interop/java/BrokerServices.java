import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInboundHandlerAdapter;
import io.netty.channel.embedded.EmbeddedChannel;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Callable;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.transaction.AbstractTransactionalMessageCheckListener;
import org.apache.rocketmq.broker.transaction.queue.TransactionalMessageBridge;
import org.apache.rocketmq.broker.transaction.queue.TransactionalMessageServiceImpl;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;
import org.apache.rocketmq.common.topic.TopicValidator;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RequestCode;
import org.apache.rocketmq.remoting.protocol.ResponseCode;
import org.apache.rocketmq.remoting.protocol.header.ConsumerSendMsgBackRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.EndTransactionRequestHeader;
import org.apache.rocketmq.store.AppendMessageResult;
import org.apache.rocketmq.store.PutMessageResult;

/** What a broker does with stored messages: transactions, send-back, delivery of delayed ones. */
final class BrokerServices {
    private static final long PATIENCE_NS = 15_000_000_000L;

    private final OpenStore open;
    private final BrokerController broker;
    private TransactionalMessageServiceImpl transactions;
    /** the half messages of this session, in order */
    private final List<MessageExt> halves = new ArrayList<>();
    private boolean delivering;

    BrokerServices(OpenStore open) {
        this.open = open;
        this.broker = open.broker;
    }

    /** Does what "action" says. */
    JSONObject act(JSONObject given) throws Exception {
        switch (given.getString("action")) {
            case "prepare":
                return prepare(StoreWriter.message(given));
            case "commit":
                return end(given.getIntValue("half"), MessageSysFlag.TRANSACTION_COMMIT_TYPE);
            case "rollback":
                return end(given.getIntValue("half"), MessageSysFlag.TRANSACTION_ROLLBACK_TYPE);
            case "check":
                return check();
            case "sendBack":
                return sendBack(given);
            case "deliver":
                return deliver(given);
            case "delete":
                return delete();
            default:
                throw new IllegalArgumentException("unknown action " + given);
        }
    }

    private TransactionalMessageServiceImpl transactions() {
        if (transactions == null) {
            transactions = new TransactionalMessageServiceImpl(new TransactionalMessageBridge(broker, open.store));
            broker.setTransactionalMessageService(transactions);
        }
        return transactions;
    }

    private JSONObject prepare(MessageExtBrokerInner message) throws Exception {
        PutMessageResult result = transactions().prepareMessage(message);
        AppendMessageResult appended = result.getAppendMessageResult();
        open.awaitDispatch();
        halves.add(open.store.lookMessageByOffset(appended.getWroteOffset()));
        return StoreWriter.answer(result);
    }

    private JSONObject end(int index, int how) throws Exception {
        MessageExt half = halves.get(index);
        EndTransactionRequestHeader header = new EndTransactionRequestHeader();
        header.setTopic(half.getProperty(MessageConst.PROPERTY_REAL_TOPIC));
        header.setProducerGroup(half.getProperty(MessageConst.PROPERTY_PRODUCER_GROUP));
        header.setTranStateTableOffset(half.getQueueOffset());
        header.setCommitLogOffset(half.getCommitLogOffset());
        header.setCommitOrRollback(how);
        header.setFromTransactionCheck(false);
        header.setMsgId(half.getMsgId());
        transactions();
        long ops = open.store.getMaxOffsetInQueue(TopicValidator.RMQ_SYS_TRANS_OP_HALF_TOPIC, 0);
        RemotingCommand request = RemotingCommand.createRequestCommand(RequestCode.END_TRANSACTION, header);
        request.makeCustomHeaderToNet();
        JSONObject line = done(broker.getEndTransactionProcessor().processRequest(context(), request));
        await("op record", () ->
            open.store.getMaxOffsetInQueue(TopicValidator.RMQ_SYS_TRANS_OP_HALF_TOPIC, 0) > ops);
        return line;
    }

    /** One round of checks, as every 30 seconds. Says which half messages it would ask the producers about. */
    private JSONObject check() {
        broker.getConsumerOffsetManager().load();
        JSONArray asked = new JSONArray();
        transactions().check(0, 15, new AbstractTransactionalMessageCheckListener(broker) {
            @Override
            public void resolveHalfMsg(MessageExt message) {
                asked.add(new String(message.getBody()));
            }

            @Override
            public void resolveDiscardMsg(MessageExt message) {
                throw new IllegalStateException("nothing is old enough to be discarded");
            }
        });
        JSONObject line = Oracle.line("put");
        line.put("status", "PUT_OK");
        line.put("asked", asked);
        return line;
    }

    private JSONObject sendBack(JSONObject given) throws Exception {
        ConsumerSendMsgBackRequestHeader header = new ConsumerSendMsgBackRequestHeader();
        header.setOffset(given.getLongValue("phy"));
        header.setGroup(given.getString("group"));
        header.setOriginTopic(given.getString("topic"));
        header.setDelayLevel(given.getIntValue("delayLevel"));
        header.setMaxReconsumeTimes(16);
        RemotingCommand request =
            RemotingCommand.createRequestCommand(RequestCode.CONSUMER_SEND_MSG_BACK, header);
        request.makeCustomHeaderToNet();
        return done(broker.getSendMessageProcessor().processRequest(context(), request));
    }

    /** Lets the delay levels, and the timers if there are any, deliver until a queue has so many messages. */
    private JSONObject deliver(JSONObject given) throws Exception {
        broker.getScheduleMessageService().start();
        if (open.timers != null && !delivering) {
            open.timers.setShouldRunningDequeue(true);
            open.timers.start();
            delivering = true;
        }
        await("delivery", () -> open.store.getMaxOffsetInQueue(
            given.getString("topic"), given.getIntValue("queueId")) >= given.getLongValue("count"));
        // A message too many would come within this time.
        Thread.sleep(given.getIntValue("settleMs"));
        if (open.timers != null) {
            // RocketMQ notes once a second how far its timers are, later on a busy machine. A halt before that makes
            // the next start deliver again.
            long reached = System.currentTimeMillis();
            await("note of the timers' progress", () -> open.timersReadUntil() >= reached);
        }
        broker.getScheduleMessageService().shutdown();
        JSONObject line = Oracle.line("put");
        line.put("status", "PUT_OK");
        return line;
    }

    /** Deletes every commit log file but the last, whatever its age. RocketMQ deletes undispatched records, too. */
    private JSONObject delete() throws InterruptedException {
        open.awaitDispatch();
        JSONObject line = Oracle.line("put");
        line.put("status", "PUT_OK");
        // A file that somebody reads just now stays for this time, and those behind it.
        int deleted = 0;
        for (int tries = 0; tries < 100 && deleted < 2; tries++) {
            deleted += open.store.getCommitLog().deleteExpiredFile(0, 0, 0, true, 10);
            Thread.sleep(10);
        }
        line.put("deleted", deleted);
        return line;
    }

    private static JSONObject done(RemotingCommand response) {
        if (response.getCode() != ResponseCode.SUCCESS) {
            throw new IllegalStateException(response.getCode() + ": " + response.getRemark());
        }
        JSONObject line = Oracle.line("put");
        line.put("status", "PUT_OK");
        return line;
    }

    private static void await(String what, Callable<Boolean> condition) throws Exception {
        long deadline = System.nanoTime() + PATIENCE_NS;
        while (!condition.call()) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("no " + what);
            }
            Thread.sleep(2);
        }
    }

    private static ChannelHandlerContext context() {
        return new EmbeddedChannel(new ChannelInboundHandlerAdapter()).pipeline().firstContext();
    }
}
