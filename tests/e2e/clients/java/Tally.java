import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;

/** Which numbered messages came, how often, and whether each was first seen in order in its lane. */
final class Tally {
    final Set<Integer> seen = new HashSet<>();
    final Map<String, Integer> last = new HashMap<>();
    int duplicates;
    boolean inOrder = true;

    void see(int number, String lane) {
        if (!seen.add(number)) {
            duplicates++;
            return;
        }
        inOrder &= number > last.getOrDefault(lane, -1);
        last.put(lane, number);
    }

    Map<String, Object> result(int sent) {
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("sent", sent);
        result.put("received", seen.size());
        result.put("missing", sent - seen.size());
        result.put("duplicates", duplicates);
        result.put("in_order", inOrder);
        return result;
    }
}
