//! Host lists of Slurm, such as `login,node[1-3,07]`.

use crate::Incompatible;

/// More hosts than any machine has: a longer list is a mistake.
const HOSTS_MAX: usize = 1 << 16;

/// The fault of a list, as text.
type Parsed<T> = Result<T, String>;

/// The hosts of a list, in its order. Leading zeros of the first number of a range are preserved.
///
/// # Errors
/// If it is not a list, or too long.
pub fn expand(list: &str) -> Result<Vec<String>, Incompatible> {
    let refuse = |why: &str| {
        let hint = "set MASTER_ADDR to the first host";
        Incompatible::new(format!("cannot parse SLURM_STEP_NODELIST={list:?}"), why, hint)
    };
    let mut hosts = Vec::new();
    for word in words(list) {
        expand_word(word, &mut hosts).map_err(|why| refuse(&why))?;
    }
    if hosts.is_empty() {
        return Err(refuse("no host name"));
    }
    Ok(hosts)
}

/// The parts between commas that are not in brackets.
fn words(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_i32;
    list.split(move |c| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth <= 0
    })
}

fn expand_word(word: &str, hosts: &mut Vec<String>) -> Parsed<()> {
    if word.is_empty() {
        return Err("empty host name".to_owned());
    }
    let mut names = vec![String::new()];
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('[') {
        let (inside, after) = after.split_once(']').ok_or("unclosed bracket")?;
        let numbers = numbers(inside)?;
        if names.len() * numbers.len() + hosts.len() > HOSTS_MAX {
            return Err(format!("more than {HOSTS_MAX} hosts"));
        }
        let with = |name: &String| -> Vec<String> {
            numbers.iter().map(|number| format!("{name}{before}{number}")).collect()
        };
        names = names.iter().flat_map(with).collect();
        rest = after;
    }
    if rest.contains(']') {
        return Err("unopened bracket".to_owned());
    }
    hosts.extend(names.into_iter().map(|name| name + rest));
    Ok(())
}

/// `1-3,07`: the numbers as written.
fn numbers(inside: &str) -> Parsed<Vec<String>> {
    let mut all = Vec::new();
    for range in inside.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let parse = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse::<usize>().ok()).flatten()
        };
        let (Some(from), Some(to)) = (parse(first), parse(last)) else {
            return Err(format!("expected a range of numbers, found {range:?}"));
        };
        if to < from || to - from >= HOSTS_MAX {
            return Err(format!("range {range:?} is reversed or too long"));
        }
        let width = first.len();
        all.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Ok(all)
}
