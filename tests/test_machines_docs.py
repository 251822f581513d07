"""What docs/machines.md says to write on other machines: shell, Slurm, Kubernetes."""

import json
import os
import pathlib
import re
import runpy
import shlex
import socket
import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf
import yaml

from estimator_mgpu import cluster, compat
from test_docs import ROOT, blocks_of

PAGE = ROOT / 'docs' / 'machines.md'
SLURM = {'HOSTS': 'n8 n9 n10 ', 'SLURM_JOB_ID': '123456', 'SLURM_NTASKS': '3'}
# Of the manifest in the page, as the Training Operator writes it: services by their short names,
# keys in the order of its structures, and `environment`.
TFJOB = (
    '{"cluster":{"chief":["digits-chief-0.default.svc:2222"],'
    '"worker":["digits-worker-0.default.svc:2222","digits-worker-1.default.svc:2222"]},'
    '"task":{"type":"worker","index":1},"environment":"cloud"}'
)


def blocks(language):
    return [block for kind, block in blocks_of(PAGE) if kind == language]


def manifests():
    return list(yaml.safe_load_all(blocks('yaml')[0]))


def config_of(tf_config, monkeypatch):
    compat.check_tf_config(tf_config)
    monkeypatch.setenv('TF_CONFIG', tf_config)
    return tf.estimator.RunConfig()


@pytest.mark.parametrize(
    ('rank', 'task', 'handler'),
    [
        (0, ('chief', 0), 'SIG_DFL'),
        (1, ('worker', 0), 'SIG_IGN'),
        (2, ('worker', 1), 'SIG_IGN'),
    ],
)
def test_slurm(rank, task, handler, tmp_path, monkeypatch):
    """In a process of one of Slurm's tasks."""
    shown = "\nprint(os.environ['TF_CONFIG'], signal.getsignal(signal.SIGTERM).name, sep='\\n')"
    (tmp_path / 'slurm.py').write_text(blocks('python')[1] + shown)
    environment = {**os.environ, **SLURM, 'SLURM_PROCID': str(rank)}
    command = [sys.executable, str(tmp_path / 'slurm.py')]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    tf_config, name = found.stdout.splitlines()
    config = config_of(tf_config, monkeypatch)
    assert (config.task_type, config.task_id) == task
    assert cluster.addresses(config) == {
        '/job:chief/task:0': 'n8:23456',
        '/job:worker/task:0': 'n9:23456',
        '/job:worker/task:1': 'n10:23456',
    }
    assert name == handler


def test_slurm_does_nothing_without_slurm(tmp_path, monkeypatch):
    monkeypatch.delenv('TF_CONFIG', raising=False)
    (tmp_path / 'slurm.py').write_text(blocks('python')[1])
    runpy.run_path(str(tmp_path / 'slurm.py'))
    assert 'TF_CONFIG' not in os.environ


def test_slurm_resolver_mixes_up_such_names(monkeypatch):
    """What the page says of it; if that changes, the snippet may be shorter."""
    step = {'PROCID': '0', 'STEP_NODELIST': 'n[8-10]', 'STEP_TASKS_PER_NODE': '1(x3)'}
    for name, value in step.items():
        monkeypatch.setenv(f'SLURM_{name}', value)
    jobs = {'chief': 1, 'worker': 2}
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        jobs, port_base=2222, gpus_per_node=1, gpus_per_task=1, auto_set_gpu=False
    )
    spec = resolver.cluster_spec()
    assert spec.as_dict() == {'chief': ['n10:2222'], 'worker': ['n8:2222', 'n9:2222']}


def test_the_batch_script_gives_what_the_snippet_reads():
    script = blocks('bash')[0]
    assert 'export HOSTS=' in script
    assert '#SBATCH --ntasks-per-node=1\n' in script  # so ranks are in the order of the hosts
    assert 'python train.py' in script


def test_tfjob_has_a_chief_and_workers_with_the_policys_labels_and_port():
    job, policy = manifests()
    assert (job['apiVersion'], job['kind']) == ('kubeflow.org/v1', 'TFJob')
    replicas = job['spec']['tfReplicaSpecs']
    assert {name: spec['replicas'] for name, spec in replicas.items()} == {'Chief': 1, 'Worker': 2}
    assert (policy['apiVersion'], policy['kind']) == ('networking.k8s.io/v1', 'NetworkPolicy')
    selector = policy['spec']['podSelector']
    (rule,) = policy['spec']['ingress']
    assert policy['spec']['policyTypes'] == ['Ingress']
    assert rule['from'] == [{'podSelector': selector}]
    for spec in replicas.values():
        assert spec['restartPolicy'] == 'OnFailure'
        template = spec['template']
        assert selector['matchLabels'].items() <= template['metadata']['labels'].items()
        assert template['metadata']['annotations'] == {'sidecar.istio.io/inject': 'false'}
        (container,) = template['spec']['containers']
        assert container['name'] == 'tensorflow'  # which gets TF_CONFIG
        (port,) = container['ports']
        assert port['name'] == 'tfjob-port'
        assert rule['ports'] == [{'protocol': 'TCP', 'port': port['containerPort']}]
        (mount,), (volume,) = container['volumeMounts'], template['spec']['volumes']
        assert mount['name'] == volume['name']
        variables = {one['name']: one['value'] for one in container['env']}
        assert pathlib.PurePosixPath(mount['mountPath']) in (
            pathlib.PurePosixPath(variables['MODEL_DIR']).parents
        )
        assert "os.environ.get('MODEL_DIR'" in blocks('python')[0]


def test_what_tfjob_sets_is_understood(monkeypatch):
    config = config_of(TFJOB, monkeypatch)
    assert (config.task_type, config.task_id) == ('worker', 1)
    assert config.master == 'grpc://digits-worker-1.default.svc:2222'
    assert cluster.addresses(config) == {
        '/job:chief/task:0': 'digits-chief-0.default.svc:2222',
        '/job:worker/task:0': 'digits-worker-0.default.svc:2222',
        '/job:worker/task:1': 'digits-worker-1.default.svc:2222',
    }
    job, _ = manifests()
    names = [a.partition('.')[0] for a in cluster.addresses(config).values()]
    assert names == [
        f'{job["metadata"]["name"]}-{kind.lower()}-{index}'
        for kind, spec in job['spec']['tfReplicaSpecs'].items()
        for index in range(spec['replicas'])
    ]


def tf_configs_by_hand():
    """Returns what the page's shell commands set, one after another."""
    block = next(block for block in blocks('sh') if 'CLUSTER=' in block)
    printed = re.sub(r'(export TF_CONFIG=.*)', r'\1\nprintf "%s\\n" "$TF_CONFIG"', block)
    script = printed.replace('python train.py', '')
    found = subprocess.run(['sh', '-c', script], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_by_hand_it_trains(tmp_path):
    """The page's script, started by its commands, but on ports of this machine."""
    (tmp_path / 'train.py').write_text(blocks('python')[0])
    sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(3)]
    addresses = ['{}:{}'.format(*one.getsockname()) for one in sockets]
    for one in sockets:
        one.close()
    running = []
    for given in tf_configs_by_hand():
        text = json.dumps(given)
        for index, address in enumerate(addresses):
            text = text.replace(f'host{index}:2222', address)
        environment = {**os.environ, 'TF_CONFIG': text, 'CUDA_VISIBLE_DEVICES': '-1'}
        environment['PYTHONPATH'] = os.pathsep.join(sys.path)
        command = [sys.executable, 'train.py']
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        running.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
    try:
        printed = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0, 0], printed
    assert tf.train.latest_checkpoint(str(tmp_path / 'model')).endswith('model.ckpt-200')
    losses = [re.findall(r'^\d\.\d+$', text, re.MULTILINE) for text in printed]
    assert [len(found) for found in losses] == [1, 0, 0]


def test_the_firewalls_port_is_that_of_the_commands():
    ports = {a.rpartition(':')[2] for c in tf_configs_by_hand() for a in c['cluster']['worker']}
    (firewall,) = [block for block in blocks('sh') if 'ufw' in block]
    allow, deny = [shlex.split(line, comments=True) for line in firewall.strip().splitlines()]
    assert {allow[allow.index('port') + 1]} == ports == {deny[-1].partition('/')[0]}
    assert allow.index('from') and 'deny' in deny  # in this order
