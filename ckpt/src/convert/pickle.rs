//! Parses pickles without executing them: classes and functions are names, calls are nodes.
//!
//! All opcodes of protocols 0 to 5 are supported except those that need a registry (`EXT*`) or
//! external buffers (`NEXT_BUFFER`). Objects are nodes of an arena, because a pickle can fill
//! containers that are in its memo already, and create cycles. An opcode creates at most one node
//! and no node is copied, so the memory is bounded by the bytes read and by a limit on nodes.

mod machine;

use crate::region::RANK_MAX;

/// A node of a [`Pickle`].
pub(crate) type Id = usize;

/// A value in a pickle.
#[derive(Debug)]
pub(crate) enum PickleNode {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    /// Bytes, and integers beyond 64 bits.
    Bytes(Vec<u8>),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(String, String),
    /// An object outside the pickle, by its persistent id.
    Persistent(Id),
    Built(Box<PickleObject>),
}

/// The result of a call that is not executed.
#[derive(Debug)]
pub(crate) struct PickleObject {
    pub(crate) class: Id,
    pub(crate) args: Id,
    pub(crate) state: Option<Id>,
    pub(crate) items: Vec<Id>,
    pub(crate) pairs: Vec<(Id, Id)>,
}

/// A parsed pickle.
#[derive(Debug)]
pub(crate) struct Pickle {
    nodes: Vec<PickleNode>,
    pub(crate) root: Id,
}

/// Why bytes are not a pickle, and where.
#[derive(Debug)]
pub(crate) struct Bad {
    pub(crate) offset: usize,
    pub(crate) reason: String,
    /// Whether the data ended too early, so that it may be a pickle with more bytes.
    pub(crate) is_short: bool,
}

type Result<T> = std::result::Result<T, Bad>;

impl Pickle {
    /// Parses the pickle at the start of the bytes, and returns its length.
    pub(crate) fn read(bytes: &[u8]) -> Result<(Self, usize)> {
        machine::read(bytes)
    }

    /// All nodes.
    pub(crate) fn ids(&self) -> std::ops::Range<Id> {
        0..self.nodes.len()
    }

    pub(crate) fn node(&self, id: Id) -> &PickleNode {
        &self.nodes[id]
    }

    pub(crate) fn text(&self, id: Id) -> Option<&str> {
        if let PickleNode::Text(text) = self.node(id) { Some(text) } else { None }
    }

    /// An integer, or a member of an integer enum: its class, called with its value.
    pub(crate) fn int(&self, id: Id) -> Option<i64> {
        let id = match self.call(id) {
            Some((_, _, &[value])) => value,
            _ => id,
        };
        if let PickleNode::Int(value) = self.node(id) { Some(*value) } else { None }
    }

    pub(crate) fn bool(&self, id: Id) -> Option<bool> {
        if let PickleNode::Bool(value) = self.node(id) { Some(*value) } else { None }
    }

    pub(crate) fn size(&self, id: Id) -> Option<u64> {
        self.int(id)?.try_into().ok()
    }

    /// The elements of a list, a tuple, or a subclass of them such as `torch.Size`.
    pub(crate) fn items(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            PickleNode::List(items) | PickleNode::Tuple(items) => Some(items),
            PickleNode::Built(built) if !built.items.is_empty() => Some(&built.items),
            PickleNode::Built(built) => match self.node(built.args) {
                PickleNode::Tuple(args) if args.len() == 1 => match self.node(args[0]) {
                    PickleNode::List(items) | PickleNode::Tuple(items) => Some(items),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        }
    }

    /// Numbers along axes: at most as many as a tensor can have, since the list is copied for every
    /// reference to it.
    pub(crate) fn sizes(&self, id: Id) -> Option<Vec<u64>> {
        let items = self.items(id).filter(|items| items.len() <= RANK_MAX)?;
        items.iter().map(|&item| self.size(item)).collect()
    }

    /// The pairs of a dict or of a subclass of it.
    pub(crate) fn pairs(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.node(id) {
            PickleNode::Dict(pairs) => Some(pairs),
            PickleNode::Built(built) if !built.pairs.is_empty() || self.is_map(built.class) => {
                Some(&built.pairs)
            }
            _ => None,
        }
    }

    fn is_map(&self, class: Id) -> bool {
        matches!(self.node(class), PickleNode::Global(_, name) if name.ends_with("dict")
            || name.ends_with("Dict"))
    }

    /// The value of a key of a dict, or of an attribute of an object.
    pub(crate) fn get(&self, id: Id, key: &str) -> Option<Id> {
        let find = |pairs: &[(Id, Id)]| {
            pairs.iter().rev().find(|(name, _)| self.text(*name) == Some(key)).map(|pair| pair.1)
        };
        if let Some(found) = self.pairs(id).and_then(find) {
            return Some(found);
        }
        let PickleNode::Built(built) = self.node(id) else { return None };
        let state = built.state?;
        if let Some(found) = self.pairs(state).and_then(find) {
            return Some(found);
        }
        // The state of a class with slots has the attributes second.
        let PickleNode::Tuple(both) = self.node(state) else { return None };
        self.pairs(*both.get(1)?).and_then(find)
    }

    /// The value at the end of a path of keys.
    pub(crate) fn path(&self, id: Id, keys: &[&str]) -> Option<Id> {
        keys.iter().try_fold(id, |id, key| self.get(id, key))
    }

    /// Module and name of the function or class that creates an object, and its arguments.
    pub(crate) fn call(&self, id: Id) -> Option<(&str, &str, &[Id])> {
        let PickleNode::Built(built) = self.node(id) else { return None };
        let (PickleNode::Global(module, name), PickleNode::Tuple(args)) =
            (self.node(built.class), self.node(built.args))
        else {
            return None;
        };
        Some((module, name, args))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of Python's `pickle.dumps` for `{"a": [1, -2, 3.5, None, True], "b": (b"x",
    /// 300)}`, with protocols 0, 2 and 4.
    const DUMPS: [&[u8]; 3] = [
        b"(dp0\nVa\np1\n(lp2\nI1\naI-2\naF3.5\naNaI01\nasVb\np3\n(c_codecs\nencode\np4\n(Vx\np5\n\
          Vlatin1\np6\ntp7\nRp8\nI300\ntp9\ns.",
        b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffG@\x0c\x00\x00\x00\
          \x00\x00\x00N\x88eX\x01\x00\x00\x00bq\x03c_codecs\nencode\nq\x04X\x01\x00\x00\x00xq\x05X\
          \x06\x00\x00\x00latin1q\x06\x86q\x07Rq\x08M,\x01\x86q\x09u.",
        b"\x80\x04\x95*\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffG\
          @\x0c\x00\x00\x00\x00\x00\x00N\x88e\x8c\x01b\x94C\x01x\x94M,\x01\x86\x94u.",
    ];

    #[test]
    fn protocols_agree() {
        for dump in DUMPS {
            let (pickle, len) = Pickle::read(dump).unwrap();
            assert_eq!(len, dump.len());
            let a = pickle.items(pickle.get(pickle.root, "a").unwrap()).unwrap();
            assert_eq!(pickle.int(a[1]), Some(-2));
            assert!(matches!(pickle.node(a[2]), PickleNode::Float(3.5)));
            assert!(matches!(pickle.node(a[3]), PickleNode::None));
            assert!(matches!(pickle.node(a[4]), PickleNode::Bool(true)));
            let b = pickle.items(pickle.get(pickle.root, "b").unwrap()).unwrap();
            assert_eq!(pickle.int(b[1]), Some(300));
        }
    }

    /// No byte string causes a panic, and no proper prefix of a pickle is accepted.
    #[test]
    fn malformed_pickles_are_rejected() {
        let mut state = 7_u64;
        for dump in DUMPS {
            for len in 0..dump.len() {
                assert!(Pickle::read(&dump[..len]).is_err(), "{len} bytes");
            }
            for round in 0..20_000 {
                let mut bytes = dump.to_vec();
                for _ in 0..1 + round % 3 {
                    state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    let place = (state >> 33) as usize % bytes.len();
                    bytes[place] = (state >> 24) as u8;
                }
                if let Ok((pickle, _)) = Pickle::read(&bytes) {
                    pickle.get(pickle.root, "a").and_then(|id| pickle.items(id));
                }
            }
        }
    }

    #[test]
    fn cycles_and_long_integers() {
        // A list that contains itself.
        let (pickle, _) = Pickle::read(b"\x80\x02]q\x00h\x00a.").unwrap();
        assert_eq!(pickle.items(pickle.root), Some(&[pickle.root][..]));
        let (pickle, _) = Pickle::read(b"\x8a\x02\x00\xff.").unwrap();
        assert_eq!(pickle.int(pickle.root), Some(-256));
        let (pickle, _) = Pickle::read(b"\x8a\x0900000000\x01.").unwrap();
        assert!(matches!(pickle.node(pickle.root), PickleNode::Bytes(_)));
    }
}
