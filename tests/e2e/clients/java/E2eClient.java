import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.regex.Pattern;
import org.apache.pulsar.client.api.AuthenticationFactory;
import org.apache.pulsar.client.api.BatcherBuilder;
import org.apache.pulsar.client.api.ClientBuilder;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.MessageRoutingMode;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.ProxyProtocol;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.schema.GenericRecord;
import org.apache.pulsar.client.api.transaction.Transaction;

/** The Java client's program of the end-to-end tests; ../README.md has the contract. */
public final class E2eClient {
    private static final int MIB_5 = 5 * 1024 * 1024;
    private static final ObjectMapper JSON = new ObjectMapper();

    private final PulsarClient client;
    private final Map<String, String> options;
    private final String topic;

    private E2eClient(PulsarClient client, Map<String, String> options) {
        this.client = client;
        this.options = options;
        this.topic = options.get("topic");
    }

    private int number(String name, int otherwise) {
        return Integer.parseInt(options.getOrDefault(name, Integer.toString(otherwise)));
    }

    /** Without a send timeout: a broker may take as long as it likes to come back. */
    private ProducerBuilder<byte[]> producer(String topic) {
        return client.newProducer().topic(topic).blockIfQueueFull(true).sendTimeout(0, TimeUnit.SECONDS);
    }

    private Consumer<byte[]> consumer(String topic) throws PulsarClientException {
        return client.newConsumer().topic(topic).subscriptionName("s").subscribe();
    }

    private static int numberIn(Message<byte[]> message) {
        return Integer.parseInt(new String(message.getData()).trim());
    }

    /** Receive and acknowledge until everything is there; a gap of 60 s is the end. */
    private static void drain(Consumer<byte[]> consumer, Tally tally, int count, boolean byTopic) throws Exception {
        while (tally.seen.size() < count) {
            Message<byte[]> message = consumer.receive(60, TimeUnit.SECONDS);
            if (message == null) {
                throw new PulsarClientException.TimeoutException("nothing more after " + tally.seen.size());
            }
            tally.see(numberIn(message), byTopic ? message.getTopicName() : "");
            consumer.acknowledge(message);
        }
    }

    private Map<String, Object> produceConsume() throws Exception {
        int count = number("count", 10000);
        int size = number("size", 0);
        Tally tally = new Tally();
        Consumer<byte[]> consumer = consumer(topic);
        Outbox outbox = new Outbox(producer(topic).create());
        for (int i = 0; i < count; i++) {
            outbox.send(null, i, size);
        }
        drain(consumer, tally, count, false);
        outbox.flush();
        return tally.result(count);
    }

    private Map<String, Object> partitioned() throws Exception {
        int count = number("count", 2000);
        Tally tally = new Tally();
        Consumer<byte[]> consumer = consumer(topic);
        Outbox outbox = new Outbox(producer(topic).enableBatching(false)
                .messageRoutingMode(MessageRoutingMode.RoundRobinPartition).create());
        for (int i = 0; i < count; i++) {
            outbox.send(null, i);
        }
        drain(consumer, tally, count, true);
        outbox.flush();
        Map<String, Object> result = tally.result(count);
        result.put("partitions", tally.last.size());
        return result;
    }

    private Map<String, Object> pattern() throws Exception {
        int topics = number("topics", 5);
        int count = topics * number("count", 100);
        Tally tally = new Tally();
        List<Outbox> outboxes = new ArrayList<>();
        for (int i = 0; i < topics; i++) {
            outboxes.add(new Outbox(producer(topic + "-" + i).create()));
        }
        Consumer<byte[]> consumer = client.newConsumer().topicsPattern(Pattern.compile(topic + "-.*"))
                .subscriptionName("s").subscribe();
        for (int i = 0; i < count; i++) {
            outboxes.get(i % topics).send(null, i);
        }
        drain(consumer, tally, count, true);
        for (Outbox outbox : outboxes) {
            outbox.flush();
        }
        Map<String, Object> result = tally.result(count);
        result.put("topics", tally.last.size());
        return result;
    }

    private Map<String, Object> reader() throws Exception {
        int count = number("count", 1000);
        Tally tally = new Tally();
        Outbox outbox = new Outbox(producer(topic).create());
        for (int i = 0; i < count; i++) {
            outbox.send(null, i);
        }
        outbox.flush();
        try (Reader<byte[]> reader = client.newReader().topic(topic).startMessageId(MessageId.earliest).create()) {
            while (reader.hasMessageAvailable()) {
                tally.see(numberIn(reader.readNext(60, TimeUnit.SECONDS)), "");
            }
            Map<String, Object> result = tally.result(count);
            result.put("more_left", reader.hasMessageAvailable());
            return result;
        }
    }

    private Map<String, Object> schema() throws Exception {
        switch (options.getOrDefault("kind", "json")) {
            case "string":
                return typed(Schema.STRING, new ArrayList<>(), i -> "reading " + i);
            case "avro":
                return typed(Schema.AVRO(Reading.class), new ArrayList<>(), Reading::of);
            case "auto":
                return autoConsume();
            default:
                return typed(Schema.JSON(Reading.class), new ArrayList<>(), Reading::of);
        }
    }

    private interface ValueOf<T> {
        T number(int number);
    }

    private <T> Map<String, Object> typed(Schema<T> schema, List<T> got, ValueOf<T> values) throws Exception {
        int count = number("count", 200);
        List<T> expected = new ArrayList<>();
        try (Consumer<T> consumer = client.newConsumer(schema).topic(topic).subscriptionName("s").subscribe();
                Producer<T> producer = client.newProducer(schema).topic(topic).create()) {
            for (int i = 0; i < count; i++) {
                expected.add(values.number(i));
                producer.sendAsync(values.number(i));
            }
            producer.flush();
            for (int i = 0; i < count; i++) {
                Message<T> message = consumer.receive(60, TimeUnit.SECONDS);
                got.add(message.getValue());
                consumer.acknowledge(message);
            }
        }
        return Map.of("sent", count, "received", got.size(), "values_equal", expected.equals(got));
    }

    /** The consumer knows no schema: it asks for the one of each message (GET_SCHEMA on a lookup connection). */
    private Map<String, Object> autoConsume() throws Exception {
        int count = number("count", 200);
        boolean equal = true;
        Set<String> versions = new HashSet<>();
        try (Producer<Reading> producer = client.newProducer(Schema.AVRO(Reading.class)).topic(topic).create();
                Consumer<GenericRecord> consumer = client.newConsumer(Schema.AUTO_CONSUME()).topic(topic)
                        .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                        .subscriptionName("s").subscribe()) {
            for (int i = 0; i < count; i++) {
                producer.sendAsync(Reading.of(i));
            }
            producer.flush();
            for (int i = 0; i < count; i++) {
                Message<GenericRecord> message = consumer.receive(60, TimeUnit.SECONDS);
                GenericRecord record = message.getValue();
                equal &= record.getField("number").equals(i) && record.getField("name").equals("reading " + i);
                versions.add(Arrays.toString(message.getSchemaVersion()));
                consumer.acknowledge(message);
            }
        }
        return Map.of("sent", count, "received", count, "values_equal", equal, "schema_versions", versions.size());
    }

    private Map<String, Object> keyShared() throws Exception {
        int count = number("count", 2000);
        int keys = number("keys", 50);
        List<Consumer<byte[]>> consumers = new ArrayList<>();
        for (int i = 0; i < number("consumers", 2); i++) {
            consumers.add(client.newConsumer().topic(topic).subscriptionName("s")
                    .subscriptionType(SubscriptionType.Key_Shared).subscribe());
        }
        Outbox outbox = new Outbox(producer(topic).batcherBuilder(BatcherBuilder.KEY_BASED).create());
        for (int i = 0; i < count; i++) {
            outbox.send(Integer.toString(i % keys), i);
        }
        outbox.flush();
        return shared(consumers, count);
    }

    private static Map<String, Object> shared(List<Consumer<byte[]>> consumers, int count) throws Exception {
        Tally tally = new Tally();
        Map<String, Set<Integer>> homes = new HashMap<>();
        int[] perConsumer = new int[consumers.size()];
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
        while (tally.seen.size() < count && System.nanoTime() < end) {
            for (int i = 0; i < consumers.size(); i++) {
                Message<byte[]> message;
                while ((message = consumers.get(i).receive(100, TimeUnit.MILLISECONDS)) != null) {
                    tally.see(numberIn(message), message.getKey());
                    homes.computeIfAbsent(message.getKey(), key -> new HashSet<>()).add(i);
                    perConsumer[i]++;
                    consumers.get(i).acknowledge(message);
                }
            }
        }
        Map<String, Object> result = tally.result(count);
        result.put("per_consumer", perConsumer);
        result.put("keys_on_one_consumer", homes.values().stream().allMatch(home -> home.size() == 1));
        return result;
    }

    /** The largest message this client accepts: its metadata counts, so step down from 5 MiB. */
    private Map<String, Object> large() throws Exception {
        Consumer<byte[]> consumer = consumer(topic);
        Producer<byte[]> producer = producer(topic).enableBatching(false).create();
        for (int size = MIB_5; size > MIB_5 - 1024; size -= 16) {
            byte[] payload = new byte[size];
            new Random(size).nextBytes(payload);
            try {
                producer.send(payload);
            } catch (PulsarClientException.InvalidMessageException tooBig) {
                continue;
            }
            Message<byte[]> message = consumer.receive(60, TimeUnit.SECONDS);
            consumer.acknowledge(message);
            return Map.of("size", size, "payload_equal", Arrays.equals(payload, message.getData()));
        }
        throw new IllegalStateException("no size near 5 MiB was accepted");
    }

    private Map<String, Object> manyTopics() throws Exception {
        int topics = number("count", 50);
        int each = 20;
        List<CompletableFuture<Consumer<byte[]>>> consumers = new ArrayList<>();
        List<CompletableFuture<Producer<byte[]>>> producers = new ArrayList<>();
        for (int i = 0; i < topics; i++) {
            consumers.add(client.newConsumer().topic(topic + "-" + i).subscriptionName("s").subscribeAsync());
            producers.add(producer(topic + "-" + i).createAsync());
        }
        int received = 0;
        boolean inOrder = true;
        for (int i = 0; i < topics; i++) {
            consumers.get(i).get(60, TimeUnit.SECONDS);    // a subscription starts at the latest message
            Outbox outbox = new Outbox(producers.get(i).get(60, TimeUnit.SECONDS));
            for (int k = 0; k < each; k++) {
                outbox.send(null, k);
            }
        }
        for (int i = 0; i < topics; i++) {
            Tally tally = new Tally();
            drain(consumers.get(i).get(), tally, each, false);
            received += tally.seen.size();
            inOrder &= tally.inOrder;
        }
        return Map.of("topics", topics, "received", received, "in_order", inOrder);
    }

    /** About 1,000 messages a second until a line comes on standard input, then drain; nothing may be missing. */
    private Map<String, Object> stream() throws Exception {
        Consumer<byte[]> consumer = consumer(topic);
        Outbox outbox = new Outbox(producer(topic).create());
        AtomicBoolean produced = new AtomicBoolean();
        int rate = number("rate", 1000);
        Thread sender = new Thread(() -> sendUntilStopped(outbox, produced, rate), "sender");
        sender.setDaemon(true);
        sender.start();
        Tally tally = new Tally();
        int reported = 0;
        long last = System.nanoTime();
        while (!(produced.get() && tally.seen.size() == outbox.sent.get())) {
            Message<byte[]> message = consumer.receive(500, TimeUnit.MILLISECONDS);
            if (message == null) {
                if (produced.get() && System.nanoTime() - last > TimeUnit.SECONDS.toNanos(60)) {
                    break;
                }
                continue;
            }
            last = System.nanoTime();
            tally.see(numberIn(message), "");
            consumer.acknowledgeAsync(message);
            if (tally.seen.size() - reported >= 100) {
                reported = tally.seen.size();
                System.out.println("PROGRESS " + JSON.writeValueAsString(Map.of("received", reported)));
            }
        }
        Map<String, Object> result = tally.result(outbox.sent.get());
        result.put("send_failures", outbox.failures.get());
        return result;
    }

    private static void sendUntilStopped(Outbox outbox, AtomicBoolean produced, int rate) {
        AtomicBoolean stop = new AtomicBoolean();
        Thread listener = new Thread(() -> {
            try {
                new BufferedReader(new InputStreamReader(System.in)).readLine();
            } catch (java.io.IOException gone) {
                System.err.println("standard input: " + gone);
            }
            stop.set(true);
        }, "stop");
        listener.setDaemon(true);
        listener.start();
        try {
            while (!stop.get()) {
                for (int i = 0; i < rate / 100; i++) {
                    outbox.send(null, outbox.sent.get());
                }
                Thread.sleep(10);
            }
            outbox.producer.flush();
        } catch (Exception error) {
            outbox.failures.incrementAndGet();
            System.err.println("flush: " + error);
        }
        produced.set(true);
    }

    /** One transaction that aborts, then one that commits; what a subscription gets in the end. */
    private Map<String, Object> transactions() throws Exception {
        Consumer<byte[]> consumer = consumer(topic);
        Producer<byte[]> producer = producer(topic).create();
        Transaction aborted = begun();
        producer.newMessage(aborted).value("aborted".getBytes()).send();
        aborted.abort().get(30, TimeUnit.SECONDS);
        Transaction committed = begun();
        producer.newMessage(committed).value("committed".getBytes()).send();
        boolean early = consumer.receive(1, TimeUnit.SECONDS) != null;
        committed.commit().get(30, TimeUnit.SECONDS);
        Message<byte[]> message = consumer.receive(30, TimeUnit.SECONDS);
        boolean more = consumer.receive(1, TimeUnit.SECONDS) != null;
        return Map.of("early", early, "value", message == null ? "" : new String(message.getData()), "more", more);
    }

    private Transaction begun() throws Exception {
        return client.newTransaction().withTransactionTimeout(1, TimeUnit.MINUTES).build().get(30, TimeUnit.SECONDS);
    }

    private Map<String, Object> attempt() throws Exception {
        producer(topic).create().close();
        return Map.of();
    }

    private Map<String, Object> run(String scenario) throws Exception {
        switch (scenario) {
            case "produce_consume": return produceConsume();
            case "partitioned": return partitioned();
            case "pattern": return pattern();
            case "reader": return reader();
            case "schema": return schema();
            case "key_shared": return keyShared();
            case "large": return large();
            case "many_topics": return manyTopics();
            case "stream": return stream();
            case "attempt": return attempt();
            case "transactions": return transactions();
            default: throw new IllegalArgumentException("no scenario " + scenario);
        }
    }

    private static PulsarClient connect(Map<String, String> options) throws PulsarClientException {
        int seconds = Integer.parseInt(options.getOrDefault("timeout_s", "30"));
        ClientBuilder builder = PulsarClient.builder().serviceUrl(options.get("url"))
                .operationTimeout(seconds, TimeUnit.SECONDS).lookupTimeout(seconds, TimeUnit.SECONDS);
        if (options.get("scenario").equals("transactions")) {
            builder.enableTransaction(true);
        }
        if (options.containsKey("token")) {
            builder.authentication(AuthenticationFactory.token(options.get("token")));
        }
        if (options.containsKey("basic")) {
            String[] parts = options.get("basic").split(":", 2);
            Map<String, String> user = Map.of("userId", parts[0], "password", parts[1]);
            builder.authentication("org.apache.pulsar.client.impl.auth.AuthenticationBasic", user);
        }
        if (options.containsKey("certificate")) {
            builder.authentication(AuthenticationFactory.TLS(options.get("certificate"), options.get("key")));
        }
        if (options.containsKey("sni_proxy")) {
            builder.proxyServiceUrl(options.get("sni_proxy"), ProxyProtocol.SNI);
        }
        if (options.containsKey("listener")) {
            builder.listenerName(options.get("listener"));
        }
        if (options.containsKey("trust")) {
            builder.tlsTrustCertsFilePath(options.get("trust")).enableTlsHostnameVerification(true);
        }
        return builder.build();
    }

    /** Run one scenario and print its result. */
    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (String argument : arguments) {
            options.put(argument.substring(0, argument.indexOf('=')), argument.substring(argument.indexOf('=') + 1));
        }
        Map<String, Object> result = new LinkedHashMap<>();
        try {
            PulsarClient client = connect(options);    // not closed: its shutdown takes two quiet seconds
            result.put("ok", true);
            result.putAll(new E2eClient(client, options).run(options.get("scenario")));
        } catch (Exception error) {
            Throwable cause = error instanceof java.util.concurrent.ExecutionException ? error.getCause() : error;
            result = Map.of("ok", false, "error_type", cause.getClass().getSimpleName(),
                    "error", String.valueOf(cause.getMessage()));
        }
        System.out.println("RESULT " + JSON.writeValueAsString(result));
        System.exit(0);
    }
}
