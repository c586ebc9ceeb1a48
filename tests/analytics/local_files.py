"""Hadoop's local file system without a process for each file and directory.

Hadoop sets permissions of local files by running `chmod` where its native library is missing, as it is in PySpark:
tests that write small tables start thousands of these. This does the same by a system call. The class is compiled by
the compiler that Spark itself uses for its queries.
"""

from pyspark.sql import SparkSession

CLASS = "LocalFilesWithoutProcesses"
SOURCE = """
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

public class LocalFilesWithoutProcesses extends LocalFileSystem {
    public LocalFilesWithoutProcesses() {
        super(new Raw());
    }

    public static class Raw extends RawLocalFileSystem {
        public void setPermission(Path path, FsPermission permission) throws IOException {
            Files.setPosixFilePermissions(
                pathToFile(path).toPath(), PosixFilePermissions.fromString(permission.toString()));
        }
    }
}
"""
SETTINGS = {
    # Spark's default writes checkpoints by another way (FileContext), which has its own local file system.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def use_local_files_without_processes(spark: SparkSession) -> None:
    """From now on; Hadoop keeps one file system for each scheme, and the first one made is it."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(SOURCE)
    configuration = jvm.org.apache.hadoop.conf.Configuration(spark.sparkContext._jsc.hadoopConfiguration())
    configuration.setClassLoader(compiler.getClassLoader())
    configuration.set("fs.file.impl", CLASS)
    jvm.org.apache.hadoop.fs.FileSystem.closeAll()
    made = jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI("file:///"), configuration)
    assert made.getClass().getName() == CLASS
