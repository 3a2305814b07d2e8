import com.alibaba.fastjson.JSONObject;
import java.io.DataInputStream;
import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.util.function.Function;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.BrokerPathConfigHelper;
import org.apache.rocketmq.broker.util.HookUtils;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.hook.PutMessageHook;
import org.apache.rocketmq.store.timer.TimerCheckpoint;
import org.apache.rocketmq.store.timer.TimerMessageStore;
import org.apache.rocketmq.store.timer.TimerMetrics;

/** A store of RocketMQ and the broker's parts around it. The broker itself is never started: it serves nobody. */
final class OpenStore {
    final BrokerController broker;
    final DefaultMessageStore store;
    /** Whether load() was content: if not, RocketMQ refuses this directory. */
    final boolean loaded;
    final boolean crashed;

    /** Only with the command's "timers": its wheel is a file of 38 MB. */
    final TimerMessageStore timers;

    /** Opens what the command's "dir" holds, with the command's file sizes, and recovers it. */
    OpenStore(JSONObject command) throws Exception {
        File root = new File(command.getString("dir"));
        crashed = new File(root, "abort").exists();
        MessageStoreConfig config = config(command);
        broker = broker(config);
        store = new DefaultMessageStore(
            config,
            broker.getBrokerStatsManager(),
            (topic, queueId, offset, tagsCode, time, bitMap, properties) -> { },
            broker.getBrokerConfig(),
            broker.getTopicConfigManager().getTopicConfigTable());
        broker.setMessageStore(store);
        hook("check", message -> HookUtils.checkBeforePutMessage(broker, message));
        hook("inner batch", message -> HookUtils.checkInnerBatch(broker, message));
        hook("later", message -> message instanceof MessageExtBrokerInner
            ? HookUtils.handleScheduleMessage(broker, (MessageExtBrokerInner) message)
            : null);
        timers = command.getBooleanValue("timers") ? timers(config) : null;
        loaded = store.load() && (timers == null || timers.load());
    }

    private TimerMessageStore timers(MessageStoreConfig config) throws Exception {
        String root = config.getStorePathRootDir();
        TimerMessageStore made = new TimerMessageStore(
            store,
            config,
            new TimerCheckpoint(BrokerPathConfigHelper.getTimerCheckPath(root)),
            new TimerMetrics(BrokerPathConfigHelper.getTimerMetricsPath(root)),
            broker.getBrokerStatsManager());
        made.registerEscapeBridgeHook(message -> broker.getEscapeBridge().putMessage(message));
        broker.setTimerMessageStore(made);
        store.setTimerMessageStore(made);
        return made;
    }

    /** The time until which all timers are delivered, ms, as the file says from which the next start goes on. */
    long timersReadUntil() throws IOException {
        String root = store.getMessageStoreConfig().getStorePathRootDir();
        try (DataInputStream file = new DataInputStream(
            new FileInputStream(BrokerPathConfigHelper.getTimerCheckPath(root)))) {
            return file.readLong();
        }
    }

    /** Shuts down in order. */
    void shutdown() {
        if (timers != null) {
            timers.shutdown();
        }
        store.shutdown();
    }

    /** What every put passes in a broker too. */
    private void hook(String name, Function<MessageExt, PutMessageResult> check) {
        store.getPutMessageHookList().add(new PutMessageHook() {
            @Override
            public String hookName() {
                return name;
            }

            @Override
            public PutMessageResult executeBeforePutMessage(MessageExt message) {
                return check.apply(message);
            }
        });
    }

    static MessageStoreConfig config(JSONObject command) {
        MessageStoreConfig config = new MessageStoreConfig();
        String dir = command.getString("dir");
        config.setStorePathRootDir(dir);
        config.setStorePathCommitLog(dir + "/commitlog");
        config.setMappedFileSizeCommitLog(command.getIntValue("segment"));
        config.setMappedFileSizeConsumeQueue(command.getIntValue("queue"));
        config.setMaxHashSlotNum(command.getIntValue("slots"));
        config.setMaxIndexNum(command.getIntValue("entries"));
        config.setFlushDiskType(FlushDiskType.valueOf(command.getString("flush")));
        // Any free port; it listens whatever one says.
        config.setHaListenPort(0);
        // A full disk under the tests is none of their business.
        config.setCleanFileForciblyEnable(false);
        return config;
    }

    static BrokerController broker(MessageStoreConfig config) {
        BrokerConfig settings = new BrokerConfig();
        settings.setBrokerName("oracle");
        settings.setBrokerIP1("127.0.0.1");
        // Op records are written at once, not every three seconds.
        settings.setTransactionOpBatchInterval(1);
        return new BrokerController(settings, new NettyServerConfig(), new NettyClientConfig(), config);
    }

    /** Starts the store and waits until everything it may show is dispatched. */
    void start() throws Exception {
        store.start();
        // It knows the delay levels, which the hooks ask it for.
        broker.getScheduleMessageService().parseDelayLevel();
        awaitDispatch();
    }

    void awaitDispatch() throws InterruptedException {
        long deadline = System.nanoTime() + 20_000_000_000L;
        while (store.dispatchBehindBytes() > 0 || store.getConfirmOffset() < store.getMaxPhyOffset()) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException(store.dispatchBehindBytes() + " bytes wait for dispatch");
            }
            Thread.sleep(1);
        }
    }

    /** Shuts down in a thread of its own, when nobody looks at the directory any more: RocketMQ takes seconds for it. */
    void shutdownLater() {
        Thread thread = new Thread(() -> {
            try {
                Thread.sleep(20_000);
                shutdown();
            } catch (Exception error) {
                error.printStackTrace();
            }
        }, "shutdown");
        thread.setDaemon(true);
        thread.start();
    }
}
