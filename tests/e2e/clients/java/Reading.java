/** The record that the schema scenario sends. */
public final class Reading {
    public int number;
    public String name;

    public static Reading of(int number) {
        Reading reading = new Reading();
        reading.number = number;
        reading.name = "reading " + number;
        return reading;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof Reading that && number == that.number && name.equals(that.name);
    }

    @Override
    public int hashCode() {
        return number;
    }
}
