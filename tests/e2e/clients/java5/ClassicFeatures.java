import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TableView;
import org.apache.pulsar.client.api.schema.GenericRecord;
import org.apache.pulsar.client.api.transaction.Transaction;

/** What the API before V5 offers. */
final class ClassicFeatures {
    private static final int MESSAGES = 50;
    private static final int LARGE = 12_000_000;

    private final PulsarClient client;
    private final PulsarAdmin admin;
    private final Cases cases;
    private final String base;

    /** A value with a schema. */
    public static class Point {
        public int x;
    }

    ClassicFeatures(PulsarClient client, PulsarAdmin admin, Cases cases, String base) {
        this.client = client;
        this.admin = admin;
        this.cases = cases;
        this.base = base;
    }

    void run() throws InterruptedException {
        cases.run("topic", this::topic);
        cases.run("chunks", this::chunks);
        cases.run("partitions", this::partitions);
        cases.run("pattern", this::pattern);
        cases.run("reader", this::reader);
        cases.run("schema", this::schema);
        cases.run("table view", this::tableView);
        cases.run("transaction", this::transaction);
    }

    private Producer<String> producer(String topic) throws PulsarClientException {
        return client.newProducer(Schema.STRING).topic(topic).sendTimeout(0, TimeUnit.SECONDS).create();
    }

    private Consumer<String> consumer(String topic) throws PulsarClientException {
        return client.newConsumer(Schema.STRING).topic(topic).subscriptionName("s")
                .subscriptionType(SubscriptionType.Shared).subscribe();
    }

    private String drain(Consumer<String> consumer, int count) throws PulsarClientException {
        int got = 0;
        for (; got < count; got++) {
            Message<String> message = consumer.receive(cases.timeoutS, TimeUnit.SECONDS);
            if (message == null) {
                break;
            }
            consumer.acknowledge(message);
        }
        return Cases.count(count, got);
    }

    private String topic() throws Exception {
        try (Consumer<String> consumer = consumer(base); Producer<String> producer = producer(base)) {
            for (int i = 0; i < MESSAGES; i++) {
                producer.send("m" + i);
            }
            return drain(consumer, MESSAGES);
        }
    }

    private String chunks() throws Exception {
        String topic = base + "-chunks";
        try (Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName("s").subscribe();
                Producer<byte[]> producer = client.newProducer().topic(topic).enableChunking(true)
                        .enableBatching(false).create()) {
            producer.send(new byte[LARGE]);
            Message<byte[]> message = consumer.receive(cases.timeoutS, TimeUnit.SECONDS);
            Cases.expect(message != null && message.size() == LARGE, "not whole");
            return message.size() + " bytes";
        }
    }

    private String partitions() throws Exception {
        String topic = base + "-partitions";
        admin.topics().createPartitionedTopic(topic, 4);
        try (Consumer<String> consumer = consumer(topic); Producer<String> producer = producer(topic)) {
            for (int i = 0; i < MESSAGES; i++) {
                producer.newMessage().key("k" + i).value("m" + i).send();
            }
            return client.getPartitionsForTopic(topic).get().size() + " partitions, " + drain(consumer, MESSAGES);
        }
    }

    private String pattern() throws Exception {
        String prefix = base + "-pattern-";
        try (Consumer<String> consumer = client.newConsumer(Schema.STRING).topicsPattern(prefix + ".*")
                .subscriptionName("s").subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .patternAutoDiscoveryPeriod(60, TimeUnit.SECONDS).subscribe()) {
            for (String name : List.of("a", "b")) {    // made later: the client is told
                try (Producer<String> producer = producer(prefix + name)) {
                    producer.send(name);
                }
            }
            return drain(consumer, 2);
        }
    }

    private String reader() throws Exception {
        String topic = base + "-reader";
        try (Producer<String> producer = producer(topic);
                Reader<String> reader = client.newReader(Schema.STRING).topic(topic)
                        .startMessageId(MessageId.earliest).create()) {
            producer.send("first");
            producer.send("last");
            int got = 0;
            while (reader.hasMessageAvailable()) {
                reader.readNext();
                got++;
            }
            reader.seek(MessageId.earliest);
            Cases.expect(reader.hasMessageAvailable(), "nothing after the seek");
            return Cases.count(2, got);
        }
    }

    private String schema() throws Exception {
        String topic = base + "-schema";
        try (Consumer<GenericRecord> consumer = client.newConsumer(Schema.AUTO_CONSUME()).topic(topic)
                .subscriptionName("s").subscribe();
                Producer<Point> producer = client.newProducer(Schema.AVRO(Point.class)).topic(topic).create()) {
            Point point = new Point();
            point.x = 7;
            producer.send(point);
            Message<GenericRecord> message = consumer.receive(cases.timeoutS, TimeUnit.SECONDS);
            Cases.expect(message != null && message.getValue().getField("x").equals(7), "not what was sent");
            return "x is 7";
        }
    }

    private String tableView() throws Exception {
        String topic = base + "-table";
        try (Producer<String> producer = producer(topic)) {
            producer.newMessage().key("a").value("1").send();
        }
        try (TableView<String> view = client.newTableView(Schema.STRING).topic(topic).create()) {
            Cases.expect("1".equals(view.get("a")), "a is " + view.get("a"));
            return "a is 1";
        }
    }

    private String transaction() throws Exception {
        String topic = base + "-transaction";
        try (Consumer<String> consumer = consumer(topic); Producer<String> producer = producer(topic)) {
            var aborted = begun();
            producer.newMessage(aborted).value("out").send();
            aborted.abort().get(cases.timeoutS, TimeUnit.SECONDS);
            var committed = begun();
            producer.newMessage(committed).value("in").send();
            Cases.expect(consumer.receive(1, TimeUnit.SECONDS) == null, "seen before the commit, or after the abort");
            committed.commit().get(cases.timeoutS, TimeUnit.SECONDS);
            Message<String> message = consumer.receive(cases.timeoutS, TimeUnit.SECONDS);
            Cases.expect(message != null && message.getValue().equals("in"), "not what was committed");
            var withdrawn = begun();    // an acknowledgement that does not count: the message comes again
            consumer.acknowledgeAsync(message.getMessageId(), withdrawn).get(cases.timeoutS, TimeUnit.SECONDS);
            withdrawn.abort().get(cases.timeoutS, TimeUnit.SECONDS);
            consumer.redeliverUnacknowledgedMessages();
            return drain(consumer, 1);
        }
    }

    private Transaction begun() throws Exception {
        return client.newTransaction().withTransactionTimeout(1, TimeUnit.MINUTES).build()
                .get(cases.timeoutS, TimeUnit.SECONDS);
    }
}
