import java.time.Duration;
import java.util.concurrent.Callable;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.v5.QueueConsumer;

/** Sends a message and receives it, again and again, and measures. */
final class Pump {
    private static final int PATIENCE_S = 60;

    int sent;
    int received;
    long slowestMs;
    private final long endNs;

    Pump(int seconds) {
        endNs = System.nanoTime() + TimeUnit.SECONDS.toNanos(seconds);
    }

    void run(PulsarClient client, String topic) throws Exception {
        try (Consumer<String> consumer = client.newConsumer(Schema.STRING).topic(topic).subscriptionName("s").subscribe();
                Producer<String> producer = client.newProducer(Schema.STRING).topic(topic).create()) {
            pump(() -> producer.send("m"), () -> {
                var message = consumer.receive(PATIENCE_S, TimeUnit.SECONDS);
                if (message != null) {
                    consumer.acknowledge(message);
                }
                return message;
            });
        }
    }

    void run(org.apache.pulsar.client.api.v5.PulsarClient client, String topic) throws Exception {
        var schema = org.apache.pulsar.client.api.v5.schema.Schema.string();
        try (QueueConsumer<String> consumer = client.newQueueConsumer(schema).topic(topic).subscriptionName("s").subscribe();
                org.apache.pulsar.client.api.v5.Producer<String> producer = client.newProducer(schema).topic(topic).create()) {
            pump(() -> producer.newMessage().value("m").send(), () -> {
                var message = consumer.receive(Duration.ofSeconds(PATIENCE_S));
                if (message != null) {
                    consumer.acknowledge(message.id());
                }
                return message;
            });
        }
    }

    private void pump(Callable<?> send, Callable<?> receive) throws Exception {
        while (System.nanoTime() < endNs) {
            long startNs = System.nanoTime();
            send.call();
            sent++;
            if (receive.call() != null) {
                received++;
            }
            if (sent > 20) {    // the first ones have the JVM's start in them
                slowestMs = Math.max(slowestMs, TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - startNs));
            }
            Thread.sleep(50);
        }
    }
}
