//! The guides about other systems agree with `trainer import-config`.

use std::fs;

use crate::import::{config_value, read};

const COMMAND: &str = "trainer import-config --from ";

/// The pages about other systems have a command, and below it a list of the mapped keys.
#[test]
fn coming_from_maps_each_launch_script() {
    let import = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import");
    let pages = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guides/coming-from");
    let (mut commands, mut keys) = (0, 0);
    for page in fs::read_dir(pages).unwrap() {
        let page = page.unwrap().path();
        let text = fs::read_to_string(&page).unwrap().replace("\\\n", " ");
        for part in text.split(COMMAND).skip(1).filter(|part| part.contains("recipe/tests/")) {
            let place = page.display();
            let (command, below) = part.split_once(" > ").expect("a file for the config");
            let words: Vec<&str> = command.split_whitespace().collect();
            let (source, files) = words.split_first().unwrap();
            let files: Vec<&str> =
                files.iter().map(|file| file.rsplit('/').next().unwrap()).collect();
            let is_there = |file: &&str| fs::exists(format!("{import}/{file}")).unwrap();
            assert!(files.iter().all(is_there), "{place}: {command}");
            let run = read(source, &files, None);
            // An item of the list equals the printed line of the key.
            for item in below.lines().filter_map(|line| line.strip_prefix("- `")) {
                let Some((key, expected)) =
                    item.split_once('`').and_then(|(code, _)| code.split_once(" = "))
                else {
                    continue;
                };
                assert_eq!(config_value(&run, key), expected, "{place}: {key} of {command}");
                keys += 1;
            }
            commands += 1;
        }
    }
    assert!(commands >= 9 && keys >= 18, "{commands} commands, {keys} keys");
}
