import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Authentication;
import org.apache.pulsar.client.api.AuthenticationFactory;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;

/** The Java client with AuthenticationSasl; ../README.md has the contract. `section` names a part of jaas.conf. */
public final class KerberosClient {
    private static final ObjectMapper JSON = new ObjectMapper();

    private static PulsarClient connect(Map<String, String> options) throws Exception {
        Map<String, String> parameters = Map.of("saslJaasClientSectionName", options.get("section"), "serverType", "proxy");
        Authentication sasl = AuthenticationFactory.create(
                "org.apache.pulsar.client.impl.auth.AuthenticationSasl", JSON.writeValueAsString(parameters));
        int seconds = Integer.parseInt(options.getOrDefault("timeout_s", "30"));
        return PulsarClient.builder().serviceUrl(options.get("url")).authentication(sasl)
                .operationTimeout(seconds, TimeUnit.SECONDS).lookupTimeout(seconds, TimeUnit.SECONDS).build();
    }

    /** Send and receive `count` messages; how many came, and whether in order. */
    private static Map<String, Object> produceConsume(PulsarClient client, String topic, int count) throws Exception {
        Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName("s").subscribe();
        Producer<byte[]> producer = client.newProducer().topic(topic).blockIfQueueFull(true).create();
        for (int i = 0; i < count; i++) {
            producer.sendAsync(Integer.toString(i).getBytes());
        }
        producer.flush();
        int received = 0;
        boolean inOrder = true;
        while (received < count) {
            Message<byte[]> message = consumer.receive(15, TimeUnit.SECONDS);
            if (message == null) {
                break;
            }
            inOrder &= Integer.parseInt(new String(message.getData())) == received;
            received++;
            consumer.acknowledge(message);
        }
        return Map.of("received", received, "in_order", inOrder);
    }

    /** Run the one scenario and print its result. */
    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (String argument : arguments) {
            options.put(argument.substring(0, argument.indexOf('=')), argument.substring(argument.indexOf('=') + 1));
        }
        Map<String, Object> result = new LinkedHashMap<>();
        try {
            PulsarClient client = connect(options);    // not closed: its shutdown takes two quiet seconds
            int count = Integer.parseInt(options.getOrDefault("count", "1000"));
            result.put("ok", true);
            result.putAll(produceConsume(client, options.get("topic"), count));
        } catch (Exception error) {
            Throwable cause = error instanceof ExecutionException ? error.getCause() : error;
            result = Map.of("ok", false, "error_type", cause.getClass().getSimpleName(),
                    "error", String.valueOf(cause.getMessage()));
        }
        System.out.println("RESULT " + JSON.writeValueAsString(result));
        System.exit(0);
    }
}
