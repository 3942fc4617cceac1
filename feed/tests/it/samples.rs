//! [`Samples`] for custom training loops equal those of a run.

use crate::common::{Lab, VOCAB};
use feed::{AnyBatch, Data, OrderKind, Samples, SamplesOptions, open_corpus};
use indexed::Split;
use loader::LoaderOptions;
use recipe::config::Config;
use recipe::mesh::{DeviceMesh, MeshRank};
use serde_json::Value;

fn load(lab: &Lab, name: &str, keys: &[(&str, &str)]) -> Config {
    let path = lab.config(name, keys);
    Config::load(path.to_str().expect("UTF-8"), &[]).expect("a good config")
}

fn tokens(batch: &AnyBatch) -> Vec<i64> {
    let AnyBatch::Lm(batch) = batch else { panic!("running text") };
    [&batch.tokens[..], &batch.labels].concat()
}

#[test]
fn samples_equal_those_of_a_run() {
    let lab = Lab::new();
    let config = load(&lab, "run", &[("batch.global", "4"), ("batch.micro", "4")]);
    let data = Data::new(open_corpus(&config).expect("it is there"), &config).expect("an order");
    let mesh_rank = MeshRank { mesh: DeviceMesh::ALONE, rank: 0 };
    let mut run = data.train_batches(&config, mesh_rank, 8).expect("enough samples");
    let options = SamplesOptions::new(Split::Train, Some(config.samples_total()));
    let (samples, _) = Samples::open(&config, &options).expect("an order");
    let mut ahead = samples.load(LoaderOptions::new(4, 8..48)).expect("enough samples");
    let mut by_number = samples.reader(true).expect("an objective");
    for first in (8..48).step_by(4) {
        let mut expected = Vec::new();
        run.fill(1, &mut expected).expect("it can be read");
        let read = ahead.next_batch().expect("it can be read").expect("a batch");
        assert_eq!(tokens(&read), tokens(&expected[0]));
        let numbers: Vec<u64> = (first..first + 4).collect();
        let read = by_number.read(&numbers).expect("it can be read");
        assert_eq!(tokens(&read), tokens(&expected[0]));
    }
}

#[test]
fn identity_depends_on_everything_that_determines_the_samples() {
    let lab = Lab::new();
    lab.corpus("other", 3);
    let of = |keys: &[(&str, &str)], options: &SamplesOptions| -> Value {
        let config = load(&lab, "run", keys);
        let (samples, corpora) = Samples::open(&config, options).expect("it is there");
        samples.identity(&config, &corpora, options).expect("a JSON")
    };
    let usual = SamplesOptions::new(Split::Train, Some(48));
    let one = of(&[], &usual);
    assert_eq!(one, of(&[("optim.lr.peak", "0.1"), ("model.layers", "1")], &usual));
    assert_eq!(one, of(&[("data.split", "'90, 10.0, 0'")], &usual));
    let other = format!("'{}'", lab.path("other").display());
    for keys in [
        ("run.seed", "7"),
        ("model.seq_len", "8"),
        ("data.split", "'80,20,0'"),
        ("data.reset_at_document", "true"),
        ("data.mask_eod_loss", "true"),
        ("data.train", other.as_str()),
    ] {
        assert_ne!(one, of(&[keys], &usual), "{keys:?}");
    }
    assert_ne!(one, of(&[], &SamplesOptions::new(Split::Valid, Some(48))));
    assert_ne!(one, of(&[], &SamplesOptions::new(Split::Train, Some(49))));
    let mut blocks = usual.clone();
    blocks.order = OrderKind::Blocks;
    assert_ne!(one, of(&[], &blocks));
}

#[test]
fn orders_without_an_index() {
    let lab = Lab::new();
    lab.corpus("other", 3);
    let config = load(&lab, "run", &[("data.split", "'1,0,0'")]);
    let mut options = SamplesOptions::new(Split::Train, Some(5000));
    options.identifiers = Some(Value::Null);
    for order in [OrderKind::Blocks, OrderKind::File] {
        options.order = order;
        let (samples, _) = Samples::open(&config, &options).expect("an order");
        assert!(samples.count() > 0);
        if order == OrderKind::Blocks {
            assert!(samples.count() >= 5000);
            let batch = samples.reader(true).expect("lm").read(&[0, 4999]).expect("it is there");
            assert!(batch.tokens().all(|token| (0..i64::from(VOCAB)).contains(&token)));
        }
        let blend = format!(
            "[{{ path = '{}', weight = 1.0 }}, {{ path = '{}', weight = 1.0 }}]",
            lab.path("corpus").display(),
            lab.path("other").display()
        );
        let blend = load(&lab, "blend", &[("data.train", &blend)]);
        let error = Samples::open(&blend, &options).expect_err("two corpora").to_string();
        assert!(error.contains("a blend of 2 corpora"), "{error}");
    }
    options = SamplesOptions::new(Split::Train, None);
    let (samples, _) = Samples::open(&config, &options).expect("an order");
    let tokens = open_corpus(&config).expect("it is there").token_count();
    assert_eq!(samples.count(), (tokens - 1) / 16, "one epoch");
}
