pub fn root() -> std::path::PathBuf {
    "/work/h/values".into()
}
