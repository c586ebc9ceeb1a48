import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/** Runs features one after the other, each with an end, and keeps what each of them says. */
final class Cases {
    private static final ExecutorService POOL = Executors.newCachedThreadPool(task -> {
        Thread thread = new Thread(task);
        thread.setDaemon(true);
        return thread;
    });

    final Map<String, String> passed = new LinkedHashMap<>();
    final Map<String, String> failed = new LinkedHashMap<>();
    final int timeoutS;
    private final String only;

    Cases(Map<String, String> options) {
        timeoutS = Integer.parseInt(options.getOrDefault("timeout_s", "30"));
        only = options.getOrDefault("only", ".*");
    }

    void run(String name, Callable<String> body) throws InterruptedException {
        if (!name.matches(only)) {
            return;
        }
        Future<String> future = POOL.submit(body);
        try {
            passed.put(name, future.get(3L * timeoutS, TimeUnit.SECONDS));
        } catch (ExecutionException error) {
            failed.put(name, chain(error.getCause()));
        } catch (TimeoutException error) {
            future.cancel(true);
            failed.put(name, "it hangs");
        }
    }

    /** What an error and its causes say. */
    static String chain(Throwable error) {
        StringBuilder text = new StringBuilder();
        for (int depth = 0; error != null && depth < 6; depth++, error = error.getCause()) {
            text.append(text.length() == 0 ? "" : " <- ").append(error.getClass().getSimpleName()).append(": ")
                    .append(error.getMessage());
        }
        return text.toString();
    }

    static void expect(boolean good, String text) {
        if (!good) {
            throw new IllegalStateException(text);
        }
    }

    static String count(int expected, int got) {
        expect(got == expected, "received " + got + " of " + expected);
        return got + " messages";
    }
}
