"""The options of RocketMQ's MessageStoreConfig that RayMQ does not have, each with the reason.

docs/reference/configuration.md shows the table, and a start that is given one of them says the reason.
"""

from __future__ import annotations

#: the reason -> the options, by RocketMQ's names
_REASONS = {
    "the data directory of a cluster has every file": (
        "storePathRootDir storePathDLedgerCommitLog storePathEpochFile storePathBrokerIdentity"
    ),
    "replication has its own protocol, elections and limits: `replicas`, `nodes` and `catch_up_bytes_per_s`": (
        "haListenPort haSendHeartbeatInterval haHousekeepingInterval haTransferBatchSize haMasterAddress "
        "haMaxGapNotInSync haFlowControlEnable maxHaTransferByteInSecond haMaxTimeSlaveNotCatchup brokerRole "
        "totalReplicas inSyncReplicas minInSyncReplicas allAckInSyncStateSet enableAutoInSyncReplicas "
        "enableDLegerCommitLog dLegerGroup dLegerPeers dLegerSelfId preferredLeaderId syncMasterFlushOffsetWhenStartup "
        "maxChecksumRange replicasPerDiskPartition maxSlaveResendLength syncFromLastFile asyncLearner "
        "offsetCheckInSlave duplicationEnable"
    ),
    "consume queues are synced with the checkpoint, and recovery makes them again from the log": (
        "flushIntervalConsumeQueue flushConsumeQueueLeastPages flushConsumeQueueThoroughInterval "
        "putConsumeQueueDataByFileChannel correctLogicMinOffsetSleepInterval correctLogicMinOffsetForceInterval "
        "flushDelayOffsetInterval"
    ),
    "one thread makes the consume queues of a shard, in columns": (
        "dispatchCqThreads dispatchCqCacheNum enableAsyncReput enableBuildConsumeQueueConcurrently "
        "batchDispatchRequestThreadPoolNums dispatchFromSenderThread recheckReputOffsetFromCq messageIndexSafe "
        "putMsgIndexHightWater"
    ),
    "RocketMQ's extended, batch, RocksDB, LMQ and tiered stores are not there": (
        "storeType enableConsumeQueueExt mappedFileSizeConsumeQueueExt mapperFileSizeBatchConsumeQueue "
        "bitMapLengthConsumeQueueExt searchBcqByCacheEnable enableBatchPush enableLmq enableMultiDispatch "
        "maxLmqConsumeQueueNum cleanRocksDBDirtyCQIntervalMin statRocksDBCQIntervalSec memTableFlushIntervalMs "
        "realTimePersistRocksDBConfig enableRocksDBLog rocksdbCQDoubleWriteEnable "
        "bottomMostCompressionTypeForConsumeQueueStore rocksdbCompressionType rocksdbFlushWalFrequency "
        "rocksdbWalFileRollingThreshold"
    ),
    "one put lock in Python has no variants": (
        "useReentrantLockWhenPutMessage useABSLock spinLockCollisionRetreatOptimalDegree topicQueueLockNum "
        "debugLockEnable putMessageTimeout maxAsyncPutMessageRequests"
    ),
    "recovery always checks CRCs, and reads as much as the marks demand": (
        "checkCRCOnRecover maxRecoveryCommitlogFiles enabledAppendPropCRC forceVerifyPropCRC"
    ),
    "files are deleted when no reader has them, and mapped as long as they are there": (
        "destroyMapedFileIntervalForcibly redeleteHangedFileInterval maxBatchDeleteFilesNum mappedFileSwapEnable "
        "commitLogForceSwapMapInterval commitLogSwapMapInterval commitLogSwapMapReserveFileNum "
        "logicQueueForceSwapMapInterval logicQueueSwapMapInterval cleanSwapedMapInterval "
        "logicQueueSwapMapReserveFileNum logicalDiskSpaceCleanForciblyThreshold flushLeastPagesWhenWarmMapedFile"
    ),
    "timers and delay levels have RocketMQ's defaults, which are part of their files": (
        "timerPrecisionMs timerRollWindowSlot timerFlushIntervalMs timerGetMessageThreadNum timerPutMessageThreadNum "
        "timerEnableDisruptor timerEnableCheckMetrics timerInterceptDelayLevel timerStopEnqueue timerCheckMetricsWhen "
        "timerSkipUnknownError timerWarmEnable timerStopDequeue timerEnableRetryUntilSuccess "
        "timerMetricSmallThreshold timerProgressLogIntervalMs timerColdDataCheckIntervalMs disappearTimeAfterStart "
        "enableScheduleMessageStats enableScheduleAsyncDeliver scheduleAsyncDeliverMaxPendingLimit "
        "scheduleAsyncDeliverMaxResendNum2Blocked"
    ),
    "a reader says how much it reads, and pages are read as the kernel decides": (
        "defaultQueryMaxNum pullBatchMaxMessageCount maxConsumeQueueScan sampleCountThreshold sampleSteps "
        "coldDataFlowControlEnable coldDataScanEnable dataReadAheadEnable accessMessageInMemoryHotRatio "
        "diskFallRecorded readUnCommitted"
    ),
    "every shard can compact topics, in one thread": (
        "enableCompaction compactionThreadNum maxOffsetMapSize"
    ),
    "a full pool lets puts wait, and a put wakes the services that its promise needs": (
        "fastFailIfNoBufferInStorePool wakeCommitWhenPutMessage wakeFlushWhenPutMessage"
    ),
    "topic names and group offsets have RocketMQ's limits": (
        "maxTopicLength autoMessageVersionOnTopicLen enableCleanExpiredOffset"
    ),
}

#: RocketMQ's name -> the reason
NOT_TAKEN = {name: reason for reason, names in _REASONS.items() for name in names.split()}
