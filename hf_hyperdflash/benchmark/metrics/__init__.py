"""Metrics of `evaluate`, each a file that it loads."""

CITATION = """\
@misc{lin_hyperdflash,
  title = {HyperDFlash: MHC-Aligned Block Speculative Decoding with Gated Residual Reduction},
  author = {Lin, Luxi and Peng, Shuang and Ma, Rui and Hua, Junhao and Fan, Shuwei and Qin, Zhengda and Wang, Qiang and
            Sun, Hongjian and Chen, Fangmin and Liu, Songwei}
}
"""
