import java.util.Arrays;
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
        send(key, number, 0);
    }

    /** The number, with spaces behind it up to a size. */
    void send(String key, int number, int size) {
        sent.incrementAndGet();
        byte[] digits = Integer.toString(number).getBytes();
        byte[] value = Arrays.copyOf(digits, Math.max(size, digits.length));
        Arrays.fill(value, digits.length, value.length, (byte) ' ');
        var message = producer.newMessage().value(value);
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
