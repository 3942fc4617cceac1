//! Files that are found, and files of other formats than JSON.

mod patterns;
mod tfrecord;
