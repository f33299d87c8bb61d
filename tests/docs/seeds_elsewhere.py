"""Lines of the guides of `test_seeds` that another test shows, and those that do not hold, with the reason."""

SHOWN_BY = {
    "000 launch": "measure/test_launch_line.py::test_nodes_and_devices_of_a_line",
    "000 pip install -e . next to PaddleNLP": "project/test_beside_sources.py::"
    "test_both_are_installed_editable_and_train",
    "000 the compile line": "planner/test_core.py::test_the_documents_line_builds_it",
    "001 profile, search and train in a row": "measure/test_profile_scripts.py::"
    "test_the_default_chain_from_measuring_to_training",
    "001 all arguments of profiling": "cli/test_upstream_sets.py::test_profiles",
    "001 all arguments of the search": "cli/test_upstream_sets.py::test_searches",
    "001 all arguments of training": "cli/test_upstream_sets.py::test_galvatrons_training",
    "001 load": "distributed/test_pretrained.py::test_training_begins_with_what_load_names",
    "001 load_distributed, with the optimizer": "distributed/test_checkpoint.py::"
    "test_any_plan_continues_where_another_stopped",
    "001 Megatron's .bin and .idx": "training/test_data.py::test_samples_are_those_of_paddlenlp_pass_after_pass",
    "002 a search in the background": "cli/test_shell_scripts.py::test_a_search_in_the_background_writes_its_log",
    "003 two types of layers": "profiles/test_published.py::"
    "test_a_published_set_is_searched_and_what_was_assumed_is_reported_once",
}

# Each is refused by name or noted, never ignored.
EXCEPTIONS = {
    "000 paddlenlp/experimental/galvatron": "a plugin lives next to PaddleNLP's sources, not in them: `search_engine/`",
    "000 -std=c++11": "pybind11 and the core need C++17; one line of CMake sets it",
    "001 training GPT and T5": "the models here are Llama and Qwen2; profiles of T5's two kinds of layers are searched",
    "001 GPT and T5: llama_hf, gpt_hf": "the same: PaddleNLP's own layers of Llama and Qwen2 are trained",
    "001 profiles of a model zoo": "no machine's measurements are shipped as if they were the user's; "
    "`galvatron profile` measures them, `--analytic` derives them from a data sheet",
    "001 tokenizer options of training": "data are tokenised before, by `galvatron data prepare`; accepted with a note",
    "001 use-flash-attn on CPU": "Paddle has flash attention on GPUs alone; it is refused by name on CPU processes",
    "001 a scripts/ folder a model": "one scripts/ serves all models: MODEL_SIZE names it; paths name other folders",
    "002 --backend torch": "there is no PyTorch here: it stands for the framework's collectives, Paddle's",
    "002 --backend nccl on CPU": "it wants GPUs; refused by name",
    "002 nccl-tests and PyTorch's profiler": "messages go through Paddle, which the training uses, too; "
    "`galvatron profile import-nccl-tests` reads the output of nccl-tests",
    "002 MPI_PATH": "ranks are started without MPI; accepted with a note",
}
