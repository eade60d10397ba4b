"""The worlds of the tests: trainers, links, engines, stores, and who dies or lies among them.

A test of behaviour enters deltasync through one of these, or through the public API:

- `links`: a trainer and its receivers in threads of this process (`fleet`), links that fail;
- `trainers`: a trainer of several ranks (`trainer_of`, `Trainer`);
- `peers`: one end played message by message (`Hand`), to say what no honest peer says;
- `fleets`: an engine or a fleet of them, in threads (`engine_of`, `fleet_of`), whose calls fail or
  hang; `served`: the same behind HTTP; `remote`: in a process;
- `engines`: an engine in the test's thread, whose receiver stages in another (`staging_engine`);
- `mortals`: senders and receivers that are processes, and die at a phase (`Mortals`);
- `stores`, `published`, `faults`: stores in a folder, in memory and of S3, a run in one, and
  stores that fail;
- `programs`, `ranks`: processes to start, to watch and to kill;
- `strategies`: tensors and models for hypothesis.
"""
