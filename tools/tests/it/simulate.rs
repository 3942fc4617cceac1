//! `--simulate`: which models there are, and what is refused.

use tools::ui::simulate::Simulate;

fn simulate(spec: &str) -> anyhow::Result<String> {
    let spec = Simulate { simulate: Some(spec.to_owned()), simulate_seed: 7 };
    Ok(spec.start()?.expect("one was requested").about())
}

#[test]
fn models_are_named_or_read_from_files_and_changed() {
    let none = Simulate { simulate: None, simulate_seed: 1 };
    assert!(none.start().unwrap().is_none());
    let about = simulate("lustre,servers.stripes=8,latency_us.read=[250, 1000]").unwrap();
    assert!(about.starts_with("simulated: lustre, not measured: reads 0.25 ms"), "{about}");
    assert!(about.contains("on 8 of 16 servers") && about.ends_with("seed 7"), "{about}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ours.toml");
    let text = storage::simulate::StoreModel::built_in("nfs").unwrap();
    std::fs::write(&file, text.replace("\"nfs\"", "\"ours\"")).unwrap();
    let about = simulate(&format!("{},client.mb_per_s=5000", file.display())).unwrap();
    assert!(about.starts_with("simulated: ours"), "{about}");

    for (spec, expected) in [
        ("tape", "expected lustre, ceph, s3, nfs or a file"),
        ("lustre,servers.stripes=99", "servers.stripes"),
        ("lustre,stripes", "no '='"),
        ("", "or a file"),
    ] {
        let error = format!("{:#}", simulate(spec).unwrap_err());
        assert!(error.contains(expected), "{spec:?}: {error}");
    }
}
