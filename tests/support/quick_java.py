"""Spark's JVMs as tests need them: each lives for seconds and computes little."""

#: `java` itself reads it, in every process: no compiler but the quick one, one collector's thread
QUICK_JAVA = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
