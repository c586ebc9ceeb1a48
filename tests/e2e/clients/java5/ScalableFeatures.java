import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.schema.Schema;
import org.apache.pulsar.common.policies.data.AuthAction;

/** What the V5 API offers: scalable topics, whose segments come and go. */
final class ScalableFeatures {
    private static final int MESSAGES = 50;
    private static final Schema<String> STRING = Schema.string();

    private final PulsarClient client;
    private final PulsarAdmin admin;
    private final Cases cases;
    private final String ordinary;
    private final String base;
    private final String[] roles;

    ScalableFeatures(PulsarClient client, PulsarAdmin admin, Cases cases, Map<String, String> options) {
        this.client = client;
        this.admin = admin;
        this.cases = cases;
        this.ordinary = options.get("topic") + "-ordinary";
        this.base = options.get("topic").replaceFirst("persistent://", "topic://") + "-scalable";
        this.roles = options.get("roles").split(",");
    }

    void run() throws InterruptedException {
        cases.run("v5: queue consumer", this::queue);
        cases.run("v5: stream consumer", this::stream);
        cases.run("v5: checkpoint consumer", this::checkpoint);
        cases.run("v5: split and merge", this::splitAndMerge);
        cases.run("v5: namespace", this::namespace);
        cases.run("v5: ordinary topic", () -> exchange(ordinary));
        cases.run("v5: transaction", this::transaction);
    }

    private String scalable(String name, int segments) throws Exception {
        String topic = base + "-" + name;
        admin.scalableTopics().createScalableTopic(topic, segments);
        return topic;
    }

    private Producer<String> producer(String topic) throws Exception {
        return client.newProducer(STRING).topic(topic).create();
    }

    private QueueConsumer<String> consumer(String topic) throws Exception {
        return client.newQueueConsumer(STRING).topic(topic).subscriptionName("q")
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST).subscribe();
    }

    private static void send(Producer<String> producer, int count) throws Exception {
        for (int i = 0; i < count; i++) {
            producer.newMessage().key("k" + i).value("m" + i).send();
        }
    }

    private String take(QueueConsumer<String> consumer, int count) throws Exception {
        int got = 0;
        for (; got < count; got++) {
            var message = consumer.receive(Duration.ofSeconds(cases.timeoutS));
            if (message == null) {
                break;
            }
            consumer.acknowledge(message.id());
        }
        return Cases.count(count, got);
    }

    private String exchange(String topic) throws Exception {
        try (QueueConsumer<String> consumer = consumer(topic); Producer<String> producer = producer(topic)) {
            send(producer, MESSAGES);
            return take(consumer, MESSAGES);
        }
    }

    private String queue() throws Exception {
        return exchange(scalable("queue", 2));
    }

    private String stream() throws Exception {
        String topic = scalable("stream", 2);
        try (StreamConsumer<String> consumer = client.newStreamConsumer(STRING).topic(topic).subscriptionName("s")
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST).subscribe();
                Producer<String> producer = producer(topic)) {
            send(producer, MESSAGES);
            int got = 0;
            for (; got < MESSAGES; got++) {
                var message = consumer.receive(Duration.ofSeconds(cases.timeoutS));
                if (message == null) {
                    break;
                }
                consumer.acknowledgeCumulative(message.id());
            }
            return Cases.count(MESSAGES, got);
        }
    }

    private String checkpoint() throws Exception {
        String topic = scalable("checkpoint", 2);
        try (Producer<String> producer = producer(topic)) {
            send(producer, MESSAGES);
        }
        try (CheckpointConsumer<String> consumer = client.newCheckpointConsumer(STRING).topic(topic)
                .startPosition(Checkpoint.earliest()).create()) {
            int got = 0;
            while (got < MESSAGES && consumer.receive(Duration.ofSeconds(cases.timeoutS)) != null) {
                got++;
            }
            Cases.expect(consumer.checkpoint().toByteArray().length > 0, "no checkpoint");
            return Cases.count(MESSAGES, got);
        }
    }

    private String splitAndMerge() throws Exception {
        String topic = scalable("split", 1);
        try (QueueConsumer<String> consumer = consumer(topic); Producer<String> producer = producer(topic)) {
            send(producer, MESSAGES);
            admin.scalableTopics().splitSegment(topic, segments(topic).get(0));
            send(producer, MESSAGES);
            List<Long> active = segments(topic);
            Cases.expect(active.size() == 2, "segments " + active);
            admin.scalableTopics().mergeSegments(topic, active.get(0), active.get(1));
            send(producer, MESSAGES);
            return take(consumer, 3 * MESSAGES);
        }
    }

    private List<Long> segments(String topic) throws Exception {
        List<Long> active = new ArrayList<>();
        admin.scalableTopics().getMetadata(topic).getSegments().forEach((id, segment) -> {
            if (segment.isActive()) {
                active.add(segment.getSegmentId());
            }
        });
        Collections.sort(active);
        return active;
    }

    private String namespace() throws Exception {
        String[] parts = base.substring("topic://".length()).split("/");
        String namespace = parts[0] + "/" + parts[2];
        admin.namespaces().createNamespace(namespace);
        for (String role : roles) {
            admin.namespaces().grantPermissionOnNamespace(namespace, role, Set.of(AuthAction.produce, AuthAction.consume));
        }
        try (QueueConsumer<String> consumer = client.newQueueConsumer(STRING).namespace(namespace).subscriptionName("q")
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST).subscribe()) {
            for (String name : List.of("a", "b")) {    // made later: the client is told
                String topic = "topic://" + namespace + "/" + name;
                admin.scalableTopics().createScalableTopic(topic, 1);
                try (Producer<String> producer = producer(topic)) {
                    send(producer, MESSAGES);
                }
            }
            return take(consumer, 2 * MESSAGES);
        }
    }

    private String transaction() throws Exception {
        String topic = scalable("transaction", 2);
        try (QueueConsumer<String> consumer = consumer(topic); Producer<String> producer = producer(topic)) {
            var aborted = client.newTransaction();
            producer.newMessage().value("out").transaction(aborted).send();
            aborted.abort();
            var committed = client.newTransaction();
            producer.newMessage().value("in").transaction(committed).send();
            Cases.expect(consumer.receive(Duration.ofSeconds(1)) == null, "seen before the commit, or after the abort");
            committed.commit();
            return take(consumer, 1);
        }
    }
}
