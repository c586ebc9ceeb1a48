"""Pulsar's commands as the tests speak them: written down apart from the proxy's, and with fields that it leaves out.

The classes are made at import from the table below, whose numbers are those of Pulsar's own PulsarApi.proto. To test
the proxy with its own definitions would prove less: a wrong number there would be wrong on both sides.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "e2e.pulsar"
_TABLE = """
KeyValue string key=1 string value=2
FeatureFlags bool supports_auth_refresh=1 bool supports_broker_entry_metadata=2 bool supports_partial_producer=3
    bool supports_topic_watchers=4 bool supports_get_partitioned_metadata_without_auto_creation=5
    bool supports_repl_dedup_by_lid_and_eid=6 bool supports_topic_watcher_reconcile=7 bool supports_scalable_topics=8
    bool supports_tc_metadata_discovery=9 bool newer_than_the_proxy=99
CommandConnect string client_version=1 int32 auth_method=2 bytes auth_data=3 int32 protocol_version=4
    string auth_method_name=5 string proxy_to_broker_url=6 string original_principal=7 string original_auth_data=8
    string original_auth_method=9 FeatureFlags feature_flags=10 string proxy_version=11
CommandConnected string server_version=1 int32 protocol_version=2 int32 max_message_size=3 FeatureFlags feature_flags=4
CommandLookupTopic string topic=1 uint64 request_id=2 bool authoritative=3 string original_principal=4
    string original_auth_data=5 string original_auth_method=6 string advertised_listener_name=7
    KeyValue properties=8
CommandLookupTopicResponse string broker_service_url=1 string broker_service_url_tls=2 int32 response=3
    uint64 request_id=4 bool authoritative=5 int32 error=6 string message=7 bool proxy_through_service_url=8
CommandPartitionedTopicMetadata string topic=1 uint64 request_id=2 string original_principal=3
    string original_auth_data=4 string original_auth_method=5 bool metadata_auto_creation_enabled=6
CommandPartitionedTopicMetadataResponse uint32 partitions=1 uint64 request_id=2 int32 response=3 int32 error=4
    string message=5
CommandSubscribe string topic=1 string subscription=2 int32 sub_type=3 uint64 consumer_id=4 uint64 request_id=5
    int32 initial_position=13
CommandProducer string topic=1 uint64 producer_id=2 uint64 request_id=3
CommandSendReceipt uint64 producer_id=1 uint64 sequence_id=2
CommandFlow uint64 consumer_id=1 uint32 permits=2
CommandSuccess uint64 request_id=1
CommandProducerSuccess uint64 request_id=1 string producer_name=2
CommandError uint64 request_id=1 int32 error=2 string message=3
CommandPing
CommandPong
CommandGetSchema uint64 request_id=1 string topic=2 bytes schema_version=3
CommandGetSchemaResponse uint64 request_id=1 int32 error_code=2 string error_message=3
CommandNewTxn uint64 request_id=1 uint64 txn_ttl_seconds=2 uint64 tc_id=3
CommandNewTxnResponse uint64 request_id=1 uint64 txnid_least_bits=2 uint64 txnid_most_bits=3 int32 error=4
    string message=5
CommandAddPartitionToTxn uint64 request_id=1 uint64 txnid_least_bits=2 uint64 txnid_most_bits=3 string partitions=4
Subscription string topic=1 string subscription=2
CommandAddSubscriptionToTxn uint64 request_id=1 uint64 txnid_least_bits=2 uint64 txnid_most_bits=3
    Subscription subscription=4
CommandTcClientConnectRequest uint64 request_id=1 uint64 tc_id=2
CommandTcClientConnectResponse uint64 request_id=1 int32 error=2 string message=3
BaseCommand int32 type=1 CommandConnect connect=2 CommandConnected connected=3 CommandSubscribe subscribe=4
    CommandProducer producer=5 CommandSendReceipt send_receipt=7 CommandFlow flow=11 CommandSuccess success=13
    CommandError error=14 CommandProducerSuccess producer_success=17 CommandPing ping=18 CommandPong pong=19
    CommandPartitionedTopicMetadata partition_metadata=21
    CommandPartitionedTopicMetadataResponse partition_metadata_response=22
    CommandLookupTopic lookup_topic=23 CommandLookupTopicResponse lookup_topic_response=24
    CommandGetSchema get_schema=34 CommandGetSchemaResponse get_schema_response=35
    CommandNewTxn new_txn=50 CommandNewTxnResponse new_txn_response=51
    CommandAddPartitionToTxn add_partition_to_txn=52 CommandNewTxnResponse add_partition_to_txn_response=53
    CommandAddSubscriptionToTxn add_subscription_to_txn=54 CommandNewTxnResponse add_subscription_to_txn_response=55
    CommandTcClientConnectRequest tc_client_connect_request=62
    CommandTcClientConnectResponse tc_client_connect_response=63
"""
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}


def _command_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="e2e.proto", package=_PACKAGE, syntax="proto2")
    for line in _TABLE.replace("\n    ", " ").strip().splitlines():
        name, *words = line.split()
        message = file.message_type.add(name=name)
        for kind, assignment in zip(words[::2], words[1::2], strict=True):
            field_name, number = assignment.split("=")
            field = message.field.add(name=field_name, number=int(number), label=_Field.LABEL_OPTIONAL)
            field.type = _SCALARS.get(kind, _Field.TYPE_MESSAGE)
            if kind not in _SCALARS:
                field.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.BaseCommand"))


Command: Any = _command_class()
"""BaseCommand, as far as the tests need it."""

NO_REQUEST_ID = (1 << 64) - 1
"""The request id of an error that answers a connection rather than a request."""

LOOKUP_REDIRECT, LOOKUP_CONNECT, LOOKUP_FAILED = 0, 1, 2
