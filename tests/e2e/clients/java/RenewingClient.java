import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.zip.CRC32;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import org.apache.pulsar.client.api.AuthenticationFactory;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;

/** The Java client with tokens that it mints itself and that end soon; ../RENEWING.md has the contract. */
public final class RenewingClient {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int NUMBER_AND_SUM = 12;
    private static final long QUIET_NS = TimeUnit.SECONDS.toNanos(60);

    private final Map<String, String> options;
    private final byte[] key;
    private final AtomicInteger minted = new AtomicInteger();
    private final AtomicInteger sent = new AtomicInteger();
    private final AtomicInteger failures = new AtomicInteger();
    private final Tally tally = new Tally();
    private volatile int total = -1;    // how many messages there are; -1: not known yet
    private volatile boolean stopped;
    private int corrupt;

    private RenewingClient(Map<String, String> options) throws Exception {
        this.options = options;
        this.key = Files.readAllBytes(Path.of(options.get("key")));
    }

    private String mint() {
        minted.incrementAndGet();
        long end = System.currentTimeMillis() / 1000 + Long.parseLong(options.get("lifetime_s"));
        String signed = base64("{\"alg\":\"HS256\"}".getBytes(StandardCharsets.UTF_8)) + "."
                + base64(("{\"sub\":\"alice\",\"exp\":" + end + "}").getBytes(StandardCharsets.UTF_8));
        try {
            Mac mac = Mac.getInstance("HmacSHA256");
            mac.init(new SecretKeySpec(key, "HmacSHA256"));
            return signed + "." + base64(mac.doFinal(signed.getBytes(StandardCharsets.UTF_8)));
        } catch (java.security.GeneralSecurityException error) {
            throw new IllegalStateException(error);
        }
    }

    private static String base64(byte[] data) {
        return Base64.getUrlEncoder().withoutPadding().encodeToString(data);
    }

    private static int sumOf(byte[] message) {
        CRC32 sum = new CRC32();
        sum.update(message, 0, 8);
        sum.update(message, NUMBER_AND_SUM, message.length - NUMBER_AND_SUM);
        return (int) sum.getValue();
    }

    private void produce(Producer<byte[]> producer) {
        int size = Integer.parseInt(options.get("size"));
        long pauseNs = TimeUnit.SECONDS.toNanos(1) / Integer.parseInt(options.get("rate"));
        byte[] block = new byte[Math.max(size, NUMBER_AND_SUM)];
        new Random(1).nextBytes(block);
        long next = System.nanoTime();
        try {
            while (!stopped) {
                byte[] message = block.clone();
                ByteBuffer.wrap(message).putLong(sent.get());
                ByteBuffer.wrap(message).putInt(8, sumOf(message));
                producer.sendAsync(message).exceptionally(error -> {
                    failures.incrementAndGet();
                    return null;
                });
                sent.incrementAndGet();
                next += pauseNs;
                TimeUnit.NANOSECONDS.sleep(next - System.nanoTime());
            }
            producer.flush();
        } catch (Exception error) {
            failures.incrementAndGet();
            System.err.println("producing: " + error);
        }
        total = sent.get();
    }

    private void consume(Consumer<byte[]> consumer) throws Exception {
        long last = System.nanoTime();
        while (total < 0 || tally.seen.size() < total) {
            Message<byte[]> message = consumer.receive(500, TimeUnit.MILLISECONDS);
            if (message == null) {
                if (total >= 0 && System.nanoTime() - last > QUIET_NS) {
                    break;
                }
                continue;
            }
            last = System.nanoTime();
            byte[] data = message.getData();
            if (ByteBuffer.wrap(data).getInt(8) != sumOf(data)) {
                corrupt++;
            }
            tally.see((int) ByteBuffer.wrap(data).getLong(), "");
            consumer.acknowledgeAsync(message);
            report();
        }
    }

    private void report() throws Exception {
        System.out.println("PROGRESS " + JSON.writeValueAsString(
                Map.of("received", tally.seen.size(), "minted", minted.get())));
    }

    private void waitForStop() {
        try {
            new BufferedReader(new InputStreamReader(System.in)).readLine();
        } catch (java.io.IOException gone) {
            System.err.println("standard input: " + gone);
        }
        stopped = true;
    }

    private Map<String, Object> run() throws Exception {
        PulsarClient client = PulsarClient.builder().serviceUrl(options.get("url"))
                .statsInterval(0, TimeUnit.SECONDS)    // it would write its settings, reconnects among them, into the log
                .authentication(AuthenticationFactory.token(this::mint)).build();
        String topic = options.get("topic");
        Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName("s").subscribe();
        Producer<byte[]> producer = client.newProducer().topic(topic).blockIfQueueFull(true)
                .maxPendingMessages(500).sendTimeout(60, TimeUnit.SECONDS).create();
        report();
        start("sender", () -> produce(producer));
        start("stop", this::waitForStop);
        consume(consumer);
        Map<String, Object> result = tally.result(sent.get());
        result.putAll(Map.of("corrupt", corrupt, "send_failures", failures.get(), "minted", minted.get()));
        return result;
    }

    private static void start(String name, Runnable work) {
        Thread thread = new Thread(work, name);
        thread.setDaemon(true);
        thread.start();
    }

    /** Run until told to stop, and print the result. */
    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (String argument : arguments) {
            options.put(argument.substring(0, argument.indexOf('=')), argument.substring(argument.indexOf('=') + 1));
        }
        Map<String, Object> result;
        try {
            result = new RenewingClient(options).run();
            result.put("ok", true);
        } catch (Exception error) {
            result = Map.of("ok", false, "error_type", error.getClass().getSimpleName(),
                    "error", String.valueOf(error.getMessage()));
        }
        System.out.println("RESULT " + JSON.writeValueAsString(result));
        System.exit(0);    // not closed: its shutdown takes two quiet seconds
    }
}
