"""JVMs as tests need them: each lives for seconds and computes little."""

#: no compiler but the quick one, one collector's thread, no second look at classes from released jars
QUICK_OPTIONS = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
)
#: `java` itself reads it, in every process
QUICK_JAVA = {"JDK_JAVA_OPTIONS": " ".join(QUICK_OPTIONS)}
