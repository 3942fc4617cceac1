//! Corpora in a bucket whose URL has options.

use crate::common::{Lab, VOCAB};
use feed::{Data, Samples, SamplesOptions, open_corpus};
use indexed::{Builder, Dtype, Split};
use recipe::config::Config;
use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::{Key, open_url};

/// Where the objects of a corpus are, below a folder of its own.
fn put_corpus(server: &S3Server, folder: &str) {
    let store = open_url(&server.url(folder)).expect("a bucket");
    let key = Key::new("corpus").expect("a key");
    let mut corpus = Builder::create(&store, &key, Dtype::U16).expect("a new corpus");
    for document in 0..60_u32 {
        let tokens: Vec<u32> = (0..40).map(|at| (document * 7 + at * 13) % VOCAB).collect();
        corpus.add_sequence(&tokens).expect("room");
        corpus.end_document().expect("room");
    }
    corpus.finish().expect("room");
}

fn objects(server: &S3Server) -> Vec<String> {
    let objects = open_url(&server.url("")).expect("a bucket").list(&Key::root()).expect("it is");
    objects.into_iter().map(|object| object.key.to_string()).collect()
}

/// The folder of the order was added to the end of the URL, which is the value of its last option:
/// the order was in another bucket, in another folder, or the option was refused.
#[test]
fn the_order_of_a_corpus_in_a_bucket_is_cached_below_the_corpus() {
    let (lab, server) = (Lab::new(), S3Server::start().expect("a server"));
    let last = |folder: &str, option: &str| server.url(&format!("{folder}/corpus")) + option;
    let mut urls = vec![
        last("profile", ""),
        last("region", "&region=us-east-1"),
        last("style", "&path_style=on"),
        last("depth", "&depth=16"),
        last("stall", "&stall=5s"),
        last("tries", "&tries=3"),
        last("hedge", "&hedge=off"),
        last("credentials", "").replace("&profile=default", ""),
    ];
    // The endpoint is last, and first.
    let url = last("endpoint", "");
    let (place, options) = url.split_once('?').expect("options");
    let (endpoint, rest) = options.split_once('&').expect("options");
    urls.push(format!("{place}?{rest}&{endpoint}"));
    for url in urls {
        let folder = url.split('/').nth(3).expect("a key");
        put_corpus(&server, folder);
        let before = objects(&server);
        let train = format!("'{url}'");
        let keys = [("data.train", train.as_str()), ("eval.every", "0")];
        let path = lab.config("run", &keys);
        let config = Config::load(path.to_str().expect("UTF-8"), &[]).expect("a good config");

        let mut options = SamplesOptions::new(Split::Train, Some(48));
        options.cached = false;
        Samples::open(&config, &options).expect("an order in memory");
        assert_eq!(objects(&server), before, "{url}");
        let open = || Data::new(open_corpus(&config).expect("it is there"), &config);
        open().expect("an order");
        let new: Vec<_> =
            objects(&server).into_iter().filter(|name| !before.contains(name)).collect();
        let cache = format!("{folder}/corpus/cache/GPTDataset_indices/");
        assert!(!new.is_empty(), "{url}: the order is not stored");
        assert!(new.iter().all(|name| name.starts_with(&cache)), "{url}: {new:?}");

        // An order that is found is not written again.
        server.inject(FaultRule::every(1, Fault::Denied).of("PUT"));
        open().expect("the stored order");
        assert_eq!(server.fault_count(), 0, "{url}: the order is built again");
        server.heal();
    }
}
