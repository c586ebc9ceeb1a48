import java.util.concurrent.atomic.AtomicInteger;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException;

/** Sends asynchronously and counts what failed. */
final class Outbox {
    final Producer<byte[]> producer;
    final AtomicInteger sent = new AtomicInteger();
    final AtomicInteger failures = new AtomicInteger();

    Outbox(Producer<byte[]> producer) {
        this.producer = producer;
    }

    void send(String key, int number) {
        sent.incrementAndGet();
        var message = producer.newMessage().value(Integer.toString(number).getBytes());
        (key == null ? message : message.key(key)).sendAsync().exceptionally(error -> {
            failures.incrementAndGet();
            return null;
        });
    }

    void flush() throws PulsarClientException {
        producer.flush();
        if (failures.get() > 0) {
            throw new PulsarClientException(failures.get() + " sends failed");
        }
    }
}
