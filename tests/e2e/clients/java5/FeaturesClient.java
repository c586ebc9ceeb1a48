import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Supplier;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.Authentication;
import org.apache.pulsar.client.api.AuthenticationFactory;
import org.apache.pulsar.client.api.ClientBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.v5.PulsarClientBuilder;
import org.apache.pulsar.client.api.v5.config.TlsPolicy;
import org.apache.pulsar.client.api.v5.config.TransactionPolicy;

/** Pulsar 5's Java client, both its APIs; ../README.md has the contract. */
public final class FeaturesClient {
    private static final ObjectMapper JSON = new ObjectMapper();

    private final Map<String, String> options;
    private final AtomicInteger tokensAsked = new AtomicInteger();

    private FeaturesClient(Map<String, String> options) {
        this.options = options;
    }

    private String token() {
        tokensAsked.incrementAndGet();
        return read(options.get("token_file"));
    }

    private static String read(String file) {
        try {
            return Files.readString(Path.of(file)).trim();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private int timeoutS() {
        return Integer.parseInt(options.getOrDefault("timeout_s", "30"));
    }

    private boolean withTransactions() {
        return options.getOrDefault("transactions", "true").equals("true");
    }

    private PulsarClient v4() throws Exception {
        ClientBuilder builder = PulsarClient.builder().serviceUrl(options.get("url"))
                .statsInterval(0, TimeUnit.SECONDS)    // it would write its settings, reconnects among them, into the log
                .operationTimeout(timeoutS(), TimeUnit.SECONDS).lookupTimeout(timeoutS(), TimeUnit.SECONDS)
                .enableTransaction(withTransactions());
        if (options.containsKey("token_file")) {
            builder.authentication(AuthenticationFactory.token((Supplier<String>) this::token));
        }
        if (options.containsKey("certificate")) {
            builder.authentication(AuthenticationFactory.TLS(options.get("certificate"), options.get("key")));
        }
        if (options.containsKey("trust")) {
            builder.tlsTrustCertsFilePath(options.get("trust")).enableTlsHostnameVerification(true);
        }
        return builder.build();
    }

    private org.apache.pulsar.client.api.v5.PulsarClient v5() throws Exception {
        PulsarClientBuilder builder = org.apache.pulsar.client.api.v5.PulsarClient.builder()
                .serviceUrl(options.get("url")).operationTimeout(Duration.ofSeconds(timeoutS()));
        if (withTransactions()) {
            builder.transactionPolicy(TransactionPolicy.builder().timeout(Duration.ofMinutes(1)).build());
        }
        if (options.containsKey("token_file")) {
            builder.authentication(org.apache.pulsar.client.api.v5.auth.AuthenticationFactory.token(this::token));
        }
        if (options.containsKey("certificate")) {
            builder.authentication(org.apache.pulsar.client.api.v5.auth.AuthenticationFactory.tls(
                    options.get("certificate"), options.get("key")));
        }
        if (options.containsKey("trust")) {
            builder.tlsPolicy(TlsPolicy.builder().trustCertsFilePath(options.get("trust"))
                    .enableHostnameVerification(true).build());
        }
        return builder.build();
    }

    private Map<String, Object> features() throws Exception {
        Authentication admins = AuthenticationFactory.token(read(options.get("admin_token_file")));
        PulsarAdmin admin = PulsarAdmin.builder().serviceHttpUrl(options.get("admin_url")).authentication(admins).build();
        Cases cases = new Cases(options);
        new ClassicFeatures(v4(), admin, cases, options.get("topic")).run();
        new ScalableFeatures(v5(), admin, cases, options).run();
        return Map.of("passed", cases.passed, "failed", cases.failed);
    }

    /** Send one message after the other for a while, with whatever token is in the file when the client asks. */
    private Map<String, Object> renewing() throws Exception {
        Pump pump = new Pump(Integer.parseInt(options.get("seconds")));
        if (options.get("api").equals("v4")) {
            pump.run(v4(), options.get("topic"));
        } else {
            pump.run(v5(), options.get("topic"));
        }
        return Map.of("sent", pump.sent, "received", pump.received, "slowest_ms", pump.slowestMs,
                "minted", tokensAsked.get());
    }

    /** Run one scenario and print its result. */
    public static void main(String[] arguments) {
        Map<String, String> options = new HashMap<>();
        for (String argument : arguments) {
            options.put(argument.substring(0, argument.indexOf('=')), argument.substring(argument.indexOf('=') + 1));
        }
        Map<String, Object> result = new LinkedHashMap<>();
        try {
            FeaturesClient client = new FeaturesClient(options);
            result.putAll(options.get("scenario").equals("renewing") ? client.renewing() : client.features());
            result.put("ok", true);
        } catch (Exception error) {
            result = Map.of("ok", false, "error_type", error.getClass().getSimpleName(), "error", Cases.chain(error));
        }
        try {
            System.out.println("RESULT " + JSON.writeValueAsString(result));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        System.exit(0);    // not closed: its shutdown takes two quiet seconds
    }
}
