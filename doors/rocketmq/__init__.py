"""The remoting protocol of Apache RocketMQ. So far its codecs: bytes in, values out, no connection.

codes          the numbers of requests, answers, languages and versions
command        frames: header in JSON or binary, and body
property_text  the properties string of a message, and what a put takes of it
message_batch  the messages in the body of a batch
sys_flags      the bits of sysFlag; compressed bodies
signature      signs requests, and checks signatures
json_dialect   the JSON of bodies: fastjson's dialect, and the standard one
malformed      the error for bytes that the protocol does not allow
"""
