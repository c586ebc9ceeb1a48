import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.FileInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.WebSocket;
import java.nio.charset.StandardCharsets;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.time.Duration;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/**
 * The JDK's own WebSocket client with Pulsar's WebSocket API; ../README.md has the contract. It never connects twice:
 * the first error ends it. `token` and `ca` (a file of certificates) are optional, `count` is the least number of
 * messages; more are sent until there is a line on the standard input.
 */
public final class WebSocketClient {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final long WAIT_S = 60;

    /** Collects the whole text messages of one connection; an error or an end is the last one. */
    private static final class Inbox implements WebSocket.Listener {
        private final LinkedBlockingQueue<String> texts = new LinkedBlockingQueue<>();
        private final StringBuilder partial = new StringBuilder();

        @Override
        public CompletionStage<?> onText(WebSocket socket, CharSequence data, boolean last) {
            partial.append(data);
            if (last) {
                texts.add(partial.toString());
                partial.setLength(0);
            }
            socket.request(1);
            return null;
        }

        @Override
        public CompletionStage<?> onClose(WebSocket socket, int code, String reason) {
            texts.add("closed: " + code + " " + reason);
            return null;
        }

        @Override
        public void onError(WebSocket socket, Throwable error) {
            texts.add("error: " + error);
        }

        JsonNode next() throws Exception {
            String text = texts.poll(WAIT_S, TimeUnit.SECONDS);
            if (text == null || !text.startsWith("{")) {
                throw new IllegalStateException(text == null ? "nothing comes" : text);
            }
            return JSON.readTree(text);
        }
    }

    private static HttpClient client(Map<String, String> options) throws Exception {
        HttpClient.Builder builder = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(WAIT_S));
        if (options.containsKey("ca")) {
            KeyStore trusted = KeyStore.getInstance(KeyStore.getDefaultType());
            trusted.load(null, null);
            try (FileInputStream file = new FileInputStream(options.get("ca"))) {
                trusted.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(file));
            }
            TrustManagerFactory factory = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
            factory.init(trusted);
            SSLContext context = SSLContext.getInstance("TLS");
            context.init(null, factory.getTrustManagers(), null);
            builder.sslContext(context);
        }
        return builder.build();
    }

    private static WebSocket open(HttpClient client, Map<String, String> options, String path, Inbox inbox) {
        WebSocket.Builder builder = client.newWebSocketBuilder().connectTimeout(Duration.ofSeconds(WAIT_S));
        String query = "";
        if (options.containsKey("token")) {
            if (options.containsKey("in_query")) {
                query = "?token=" + options.get("token");
            } else {
                builder.header("Authorization", "Bearer " + options.get("token"));
            }
        }
        return builder.buildAsync(URI.create(options.get("url") + path + query), inbox).join();
    }

    private static void stream(Map<String, String> options, Map<String, Object> result) throws Exception {
        HttpClient client = client(options);
        String topic = "persistent/" + options.get("topic");
        int least = Integer.parseInt(options.getOrDefault("count", "1000"));
        Inbox messages = new Inbox();
        Inbox receipts = new Inbox();
        WebSocket consumer = open(client, options, "/ws/v2/consumer/" + topic + "/s", messages);
        WebSocket producer = open(client, options, "/ws/v2/producer/" + topic, receipts);
        int received = 0;
        boolean inOrder = true;
        while (received < least || System.in.available() == 0) {
            byte[] payload = Integer.toString(received).getBytes(StandardCharsets.UTF_8);
            String text = JSON.writeValueAsString(Map.of("payload", Base64.getEncoder().encodeToString(payload)));
            producer.sendText(text, true).join();
            JsonNode receipt = receipts.next();
            if (!"ok".equals(receipt.get("result").asText())) {
                throw new IllegalStateException(receipt.toString());
            }
            JsonNode message = messages.next();
            String body = new String(Base64.getDecoder().decode(message.get("payload").asText()), StandardCharsets.UTF_8);
            inOrder &= Integer.parseInt(body) == received;
            consumer.sendText(JSON.writeValueAsString(Map.of("messageId", message.get("messageId").asText())), true).join();
            received++;
            System.out.println("PROGRESS " + JSON.writeValueAsString(Map.of("received", received)));
        }
        result.put("received", received);
        result.put("in_order", inOrder);
        producer.sendClose(WebSocket.NORMAL_CLOSURE, "").join();
        consumer.sendClose(WebSocket.NORMAL_CLOSURE, "").join();
    }

    /** Run the one scenario and print its result. */
    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (String argument : arguments) {
            options.put(argument.substring(0, argument.indexOf('=')), argument.substring(argument.indexOf('=') + 1));
        }
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("ok", true);
        try {
            stream(options, result);
        } catch (Exception error) {
            Throwable cause = error instanceof CompletionException ? error.getCause() : error;
            result.put("ok", false);
            result.put("error", cause.toString());
        }
        System.out.println("RESULT " + JSON.writeValueAsString(result));
        System.out.flush();
        System.exit(0);
    }
}
